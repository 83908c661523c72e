"""Random schedules of a scheduler on one or more ranks, in one process, on virtual time.

Everything that happens in a schedule is drawn from its seed: what comes, when each rank's device and
transfers end, what fails, how long messages and votes take. The rules of the loop are checked at every host
call of every rank. Run it by `python -m aioprefill.testing.simulate`.

- `clock`: the loop. `draws`: the random numbers. `story`: what is told and counted.
- `rules`: the order of host calls. `twins`: ranks do the same. `native_rules`, `outcomes`: the native host.
- `native`, `scripted`: the two kinds of worlds, over what they share in `world`; `endings`: how they end.
- `schedule` plays one seed; `pool` many; `reach` says what they must have reached.
- `bugs`: mistakes that have to be found.
"""
