"""What a training script registers, as a state for DCP and back.

`app_state` holds the parts of a job. `module_part`, `optimizer_part` and `value_part` know one kind
each; `fsdp1_part` asks torch instead. `names` says what a tensor is called, `packed` keeps values
as they are, `saved` is what a checkpoint holds, `wanted` what is loaded from it, `differences` what
does not fit.
"""
