"""When to save. All but three modules are rules only: no clock, file, thread or rank.

`save_timings` is one save from a rank to the run's history, `observation` what an interval cost,
`baseline` an iteration without a save, `save_cost` what the last saves cost together, `costs` and
`interval` the method of CheckFreq (Ti, Tw, Tg, Tc, Ts, k, p), `tuner` the next interval,
`constants` the numbers in these rules. `stored_profile` is what a restarted job begins with.
`step_timer` measures, `profile_file` keeps the profile, `save_schedule` says when a save is due.
"""
