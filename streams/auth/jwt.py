"""Verifies JSON Web Tokens (RFC 7519) that an issuer has signed for this server.

PyJWT checks signatures and claims. This module decides which key may sign with which algorithm,
because a token must not decide that itself (RFC 8725), and checks the times with our own clock.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import jwt
import msgspec

from streams.auth.bearer import RECHECK_S, CannotVerify, InvalidToken, principal_of
from streams.auth.jwks import KeySet
from streams.clock import wall
from streams.exchange import Caller

# The clocks of two machines may differ by this.
LEEWAY_S: Final = 30.0
KID_LETTERS_MAX: Final = 256

# Which kind of key belongs to which algorithm. All are asymmetric: the keys are public, and with a
# symmetric algorithm anyone could sign with them. RFC 7518, 3.1; RFC 8037, 3.1.
ALGORITHMS: Final[Mapping[str, Mapping[str, str]]] = {
    **{f"{family}{bits}": {"kty": "RSA"} for family in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": {"kty": "EC", "crv": "P-256"},
    "ES384": {"kty": "EC", "crv": "P-384"},
    "ES512": {"kty": "EC", "crv": "P-521"},
    "EdDSA": {"kty": "OKP", "crv": "Ed25519"},
}
# The public parts of a key; others, if a key set has them, are not used.
_PUBLIC: Final = ("kty", "crv", "n", "e", "x", "y")

# Times are checked in this module, by a clock that tests may move.
_OPTIONS: Final[Any] = {
    "require": ["exp", "iss", "aud", "sub"],
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "enforce_minimum_key_length": True,  # RSA: 2048 bits (RFC 7518, 3.3)
}


class _Header(msgspec.Struct):
    alg: str
    kid: str = ""


class _Claims(msgspec.Struct):
    """Times are seconds since 1970."""

    sub: str
    exp: float
    nbf: float = 0.0
    scope: Any = None  # RFC 9068, 2.2.3: words in one string
    scp: Any = None  # the name that some issuers use, some of them with a list

    @property
    def scopes(self) -> frozenset[str]:
        """The granted scopes, by either name; values of other types are ignored."""
        given = [self.scope, self.scp]
        lists = [each.split() if isinstance(each, str) else each for each in given]
        words = [word for each in lists if isinstance(each, list) for word in each]
        return frozenset(word for word in words if isinstance(word, str))


class JwtVerifier:
    """A `Verifier` for the tokens of one issuer, meant for one audience."""

    def __init__(
        self,
        keys: KeySet,
        *,
        issuer: str,
        audience: str,
        algorithms: Sequence[str],
        clock: Callable[[], float] = wall,
    ) -> None:
        """Raises `ValueError` for an algorithm that is not in `ALGORITHMS`."""
        if unknown := [name for name in algorithms if name not in ALGORITHMS]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(ALGORITHMS)}")
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._algorithms = tuple(algorithms)
        self._clock = clock

    def recognizes(self, token: str) -> bool:
        return token.count(".") == 2

    async def reload(self) -> None:
        self._keys.reload()  # without waiting: an issuer may take seconds

    async def verify(self, token: str) -> Caller:
        try:
            header = msgspec.convert(jwt.get_unverified_header(token), _Header)
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise InvalidToken(f"the token's header: {type(error).__name__}") from None
        if header.alg not in self._algorithms:
            raise InvalidToken("the token's algorithm is not allowed")
        if len(header.kid) > KID_LETTERS_MAX:
            raise InvalidToken("the name of the token's key is too long")
        key = await self._keys.find(header.kid, partial(_may_sign, algorithm=header.alg))
        if not self._keys.is_known:
            raise CannotVerify("the keys of the issuer could not be read yet")
        if key is None:
            raise InvalidToken("the token's key is not in the key set")
        given, claims = self._claims(token, key, header.alg)
        principal = principal_of(self._issuer, claims.sub)
        return Caller(principal, partial(self._holds_for_s, key, claims.exp), claims.scopes, given)

    def _claims(
        self, token: str, key: Mapping[str, Any], algorithm: str
    ) -> tuple[dict[str, Any], _Claims]:
        """All claims of the token, and those that this module reads."""
        public = {name: key[name] for name in _PUBLIC if name in key}
        try:
            given = jwt.decode(
                token,
                jwt.PyJWK(public, algorithm),
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                options=_OPTIONS,
            )
            claims = msgspec.convert(given, _Claims)
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise InvalidToken(f"the token: {type(error).__name__}") from None
        now = self._clock()
        if not claims.nbf - LEEWAY_S <= now < claims.exp + LEEWAY_S:  # False for NaN
            raise InvalidToken("the token has expired, or is not valid yet")
        return given, claims

    def _holds_for_s(self, key: Mapping[str, Any], expires_at: float) -> float:
        """How long the token stays valid; 0 once its key was withdrawn."""
        if key not in self._keys:
            return 0.0
        return min(expires_at + LEEWAY_S - self._clock(), RECHECK_S)


def _may_sign(key: Mapping[str, Any], *, algorithm: str) -> bool:
    """Whether a key of a key set may sign with `algorithm`: RFC 7517, 4.1 to 4.4."""
    operations = key.get("key_ops", ["verify"])
    return (
        all(key.get(name) == value for name, value in ALGORITHMS[algorithm].items())
        and key.get("alg", algorithm) == algorithm
        and key.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
    )
