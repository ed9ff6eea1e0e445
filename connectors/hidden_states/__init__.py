"""The hidden_states connector: writes hidden states of requests to files; moves no KV.

`--kv-connector hidden_states --kv-connector-config '{"path": "/var/tmp/states"}'`. A request asks
with `kv_transfer_params={"save_hidden_states": true}`, or all requests do by the option `requests`.
"""
