"""When to save. All but three modules are rules only: no clock, file, thread or rank.

`observation` is what one interval cost, `save_cost` what the last ones cost together, `baseline` an
iteration without a save, `costs` and `interval` the method of CheckFreq (Ti, Tw, Tg, Tc, Ts, k, p),
`required_interval` which intervals are needed, `tuner` the next one. `stored_profile` is what a
restarted job begins with. `step_timer` measures, `profile_file` keeps the profile, `save_schedule`
says when a save is due; `save_record` is one save as a rank saw it.
"""
