"""Several processes of one host that train one set of host arenas, each with its own device and its own micro-batches.

    group.py      who belongs to it, barriers, small values from every rank, failures
    control.py    the page of shared memory with its counters
    liveness.py   notices a rank that has died or stands still
    exchange.py   sums gradients over the ranks, part by part
    shared_reads.py    brings weights from the host once: each rank its part, and on to the others
    read_choice.py     whether they do so, if asked by measuring what is faster
    pass_agreement.py  lets the ranks read the same units in the same order
    counts.py     counts by which ranks, and the streams of their devices, wait for each other
    mailboxes.py  memory of one rank into which another writes: of the device, or of the host
    cuda_driver.py  the calls of the CUDA driver that torch does not have

Nothing of it has a name in a file system, so nothing is left behind however a run ends.
"""
