"""What a run says about itself. No torch here.

- ``names``      every metric, with unit and description
- ``record``     the metrics of a record, as a pure function of it
- ``sinks``      where rows go: JSONL, TensorBoard, W&B; and reading them back
- ``curves``     rows as a picture
- ``summary``    rows as a handful of numbers
- ``progress``   what a person watching sees
"""
