"""Certificates for tests, made by the command `openssl`."""

import shutil
import subprocess

import pytest

from keras_psplus.cluster.channel import CA, CERT, KEY


def make(folder, name, authority=None):
    """Variables of a new certificate for this machine, which signs itself or by an authority."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no command `openssl` that makes certificates")
    folder.mkdir(exist_ok=True)
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    signer = [] if authority is None else ["-CA", authority[CERT], "-CAkey", authority[KEY]]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        + ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", cert]
        + ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        + (["-addext", "basicConstraints=critical,CA:FALSE"] if authority else [])
        + signer,
        check=True,
        capture_output=True,
    )
    trusted = {} if authority is None else {CA: authority[CERT]}
    return {CERT: str(cert), KEY: str(key), **trusted}
