"""The ``linckia`` command.

- ``main``         the commands and their options; checks arguments and config before anything heavy is imported
- ``checkpoints``  the commands below ``linckia checkpoints``
- ``runs``         from what a person types for RUN to where that run is
- ``client``       calls to the control API of a live run
- ``show``         tables for people
- ``supervise``    starts the controller again when it dies
- ``trainer``      the one module that calls the data plane
"""
