"""The run's log: what a run is. No torch, ray or vllm here.

- ``framing``      the bytes of every object we write: magic, checked header, payload
- ``store``        where objects are: put-if-absent and its friends over any URI
- ``local_files``, ``objects``   the two kinds of place a store can be: a folder, an fsspec filesystem
- ``patience``     waits out a place that fails for a while
- ``records``      one step's experience as bytes and back
- ``chain``        the records in order, hash-chained, with skip marks
- ``spool``        finished trajectories of the step that is being generated
- ``attempts``     who may write: attempts and generations, claimed by exclusive create
- ``process``      is a process (pid, start time) still there
"""
