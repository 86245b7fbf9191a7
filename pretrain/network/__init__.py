"""Slow links between the processes of one machine, as `compare.network` asks for: `namespaces` makes them in the kernel, as root on Linux;
`delay` holds collectives back as long as a model of a ring says, anywhere; `emulation` is the trainer's choice between them."""
