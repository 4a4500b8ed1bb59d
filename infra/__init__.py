"""What stands in a cloud, as CDKTF stacks: `<cluster>-base` lives as long as the cluster, `<cluster>-pools` from
`make up` to `make down`. Imports only `spotrun.spec`,
`spotrun.errors` and `spotrun.store.keys` of ours."""
