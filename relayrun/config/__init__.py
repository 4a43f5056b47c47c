"""What a run is: the typed schema, its composition from YAML files, and its revisions."""

from relayrun.config.schema import RunConfig as RunConfig
