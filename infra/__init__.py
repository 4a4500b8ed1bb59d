"""What exists in a cloud, as CDKTF stacks. `<cluster>-base` exists as long as the cluster, `<cluster>-pools` from
`make up` to `make down`. Of ours, this imports only `spotrun.spec`, `spotrun.errors` and `spotrun.store.keys`."""
