"""The local cloud: a daemon that behaves like managed instance groups. Its machines are process trees.

It needs Linux, but no root and no containers. `cloud.up` starts it, `cloud.down` ends it.

    cloud.py      the cloud protocol over HTTP, faults on demand, up and down
    daemon.py     the process of the cloud itself
    server.py     the daemon's HTTP interface
    pools.py      pools and machines: what is wanted, what exists, and the loop between them
    reconcile.py  the decisions of pools.py, as pure functions
    market.py     prices, capacity and advice, which change; pure
    ledger.py     when each machine existed, and at which price
    machine.py    one machine, as the daemon knows it
    metadata.py   a machine's metadata server, Google's or EC2's
    init.py       a machine's first process: starts the role and the SSH server (sshd.py)
    procs.py      finds, stops and kills the processes of a machine
    cut.py        takes a machine off the network
    layout.py     files, addresses, ports and names
"""
