"""The settings of a run: declared once in `sections`, composed from YAML and checked in `compose`.

In: YAML files, a site's file and `--set` overrides. Out: one checked config object.
`sections` lies below `control` and `compose` above it, so a job reads settings without pydantic.
`relayrun help settings` explains the files, `relayrun explain NAME` every setting.
"""
