"""What a training script registers, as a state for DCP and back.

`app_state` holds the parts of a job; `part` is what all kinds of them have in common, `per_rank`
marks what each rank keeps for itself. `module_part`, `optimizer_part` and `value_part` know one
kind each, `fsdp1_part` asks torch instead. `names` says what a tensor is called, `storable` what
could not be saved or restored.

Odd tensors: `wrappers` are saved as their inner tensors and filled by `wrapper_fill`,
`sharded_state` is optimizer state of another shape than its parameter, `odd_tensors` are those of
a module that are not just copied into, `odd_fill` fills those without elements in order.
`held_optimizers` finds optimizers inside of others.

Values: `packed` keeps them as they are, in tags for what a closed unpickler does not make: `tags`,
`value_kinds`, `user_classes`, `generators`, `tensor_kinds`.

Between ranks: `value_digests` are the same wherever a value is, `replica_paths` names what differs.

Back: `saved` is what a checkpoint holds, `wanted` what is loaded from it, `tree` nests it,
`differences` is what does not fit, `restoration` puts all parts in place or none, `optimizer_fill`
an optimizer, `from_torch` keeps from torch what its `load_state_dict` would break.
"""
