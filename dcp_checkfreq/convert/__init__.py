"""Checkpoints to and from the files of others.

`to_safetensors` writes Hugging Face's layout, which `safetensors_layout` plans; `from_files` makes
a checkpoint of safetensors and `torch.save` files, `to_torch_save` one file for `torch.load`.
`exported` says which tensors go and what they are called, `blocks` cuts large ones.
"""
