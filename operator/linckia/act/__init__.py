"""What is done about a run from outside. Everything here is idempotent: said twice, it is done once.

- ``orders``    to the controller: restart a group
- ``ray_jobs``  Ray's job API: stop a job whose controller is gone, and how it stands
- ``manifests`` what is written to Kubernetes: a child RayJob, a TrainingRun, an event, a status patch (pure)
"""
