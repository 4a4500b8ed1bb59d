"""What a node measures of its machine: `sensors` and `gpus` read, `recorder` puts blocks into the bucket."""
