"""The built-in host: requests, admission, policy, pages and prefix cache (all pure), and the host itself."""
