"""An issuer of JSON Web Tokens: its keys, its signatures, its answers to requests for the keys."""

import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER, AUDIENCE = "https://issuer.example.com", "https://mcp.example.com/mcp"
NOW = 2_000_000_000.0
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwk(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    kinds = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256"}
    name = next((name for kind, name in kinds.items() if isinstance(key, kind)), "EdDSA")
    algorithm = jwt.get_algorithm_by_name(name)
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, **more}  # type: ignore[call-overload]


KEYS = [jwk(RSA, "rsa"), jwk(EC, "ec"), jwk(ED, "ed")]


def claims(**other: Any) -> dict[str, Any]:
    usual = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": NOW + 3600}
    return {name: value for name, value in (usual | other).items() if value is not None}


def signed(key: Any = RSA, algorithm: str = "RS256", kid: str | None = "rsa", **other: Any) -> str:
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(claims(**other), key, algorithm, headers=headers)


class Issuer:
    """A source of keys, with the interface that `KeySet` asks."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.keys = list(keys)
        self.asked = 0
        self.is_away = False

    def __call__(self) -> bytes:
        self.asked += 1
        if self.is_away:
            raise OSError("nobody answers")
        return json.dumps({"keys": self.keys}).encode()
