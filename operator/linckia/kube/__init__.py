"""The operator in Kubernetes: watching, and one idempotent reconcile per run.

- ``operator``   kopf watches four kinds of objects and wakes the runs that they belong to
- ``world``      the objects as they stand, as records
- ``runner``     one task per run: many events, one reconcile
- ``reconcile``  look at a run, decide, act, write its status
- ``look``       what can be seen of a run: state API, control API, Ray's job API
- ``client``     what is written to the API server
- ``metrics``    what the operator says of itself
"""
