"""aioprefill: an asyncio prefill scheduler for disaggregated LLM serving.

Importing this package loads neither torch nor transformers nor nixl; they come with the host that needs them.
"""

__version__ = "0.1.0"
