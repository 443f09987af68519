"""When to save. All but four modules are rules only: no clock, file, thread or rank.

`observation` is what one interval cost, `save_timings` one save as a rank timed it, `save_cost`
what the last ones cost together and which intervals they need, `baseline` an iteration without a
save, `costs` and `interval` the method of CheckFreq (Ti, Tw, Tg, Tc, Ts, k, p), `tuner` the next
interval. `stored_profile` is what a restarted job begins with. `step_timer` measures,
`profile_file` keeps the profile, `save_schedule` says when a save is due; `save_record` is one save
as a rank saw it.
"""
