"""JSON Web Tokens (RFC 7519) that another has signed, for this server and nobody else.

PyJWT knows signatures and claims. Decided here is which key may have made which signature (RFC
8725: never what a token says of itself), and when a token holds, by the same clock as all else.
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

# How far the clocks of two machines may be apart.
LEEWAY_S: Final = 30.0
KID_LETTERS_MAX: Final = 256

# Which key signs by which algorithm, all of them asymmetric: what a signature is checked with is no
# secret, so with any other anybody could sign. RFC 7518, 3.1; RFC 8037, 3.1.
ALGORITHMS: Final[Mapping[str, Mapping[str, str]]] = {
    **{f"{family}{bits}": {"kty": "RSA"} for family in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": {"kty": "EC", "crv": "P-256"},
    "ES384": {"kty": "EC", "crv": "P-384"},
    "ES512": {"kty": "EC", "crv": "P-521"},
    "EdDSA": {"kty": "OKP", "crv": "Ed25519"},
}
# What of a key is public; a key set that has more than that is not to be used for more.
_PUBLIC: Final = ("kty", "crv", "n", "e", "x", "y")
_RSA_BITS_MIN: Final = 2048  # RFC 7518, 3.3

# Times are checked here, by a clock that tests may move.
_OPTIONS: Final[Any] = {
    "require": ["exp", "iss", "aud", "sub"],
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "enforce_minimum_key_length": True,
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
    scp: Any = None  # what some issuers call it, some of them as a list

    @property
    def scopes(self) -> frozenset[str]:
        """Those that the issuer has granted, by either name; other values are left out."""
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
        """Raises `ValueError` for an algorithm that is none of `ALGORITHMS`."""
        if unknown := [name for name in algorithms if name not in ALGORITHMS]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(ALGORITHMS)}")
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._algorithms = tuple(algorithms)
        self._clock = clock

    def recognizes(self, token: str) -> bool:
        return token.count(".") == 2

    async def reload(self) -> None:
        self._keys.reload()  # an issuer may take seconds, for which nothing else waits

    async def verify(self, token: str) -> Caller:
        try:
            header = msgspec.convert(jwt.get_unverified_header(token), _Header)
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise InvalidToken(f"the token's header: {type(error).__name__}") from None
        if header.alg not in self._algorithms:
            raise InvalidToken("an algorithm that is not taken here")
        if len(header.kid) > KID_LETTERS_MAX:
            raise InvalidToken("the name of the token's key is too long")
        key = await self._keys.find(header.kid, partial(_may_sign, algorithm=header.alg))
        if not self._keys.is_known:
            raise CannotVerify("the keys of the issuer could not be read yet")
        if key is None:
            raise InvalidToken("the token's key is not in the key set")
        claims = self._claims(token, key, header.alg)
        principal = principal_of(self._issuer, claims.sub)
        return Caller(principal, partial(self._holds_for_s, key, claims.exp), claims.scopes)

    def _claims(self, token: str, key: Mapping[str, Any], algorithm: str) -> _Claims:
        public = {name: key[name] for name in _PUBLIC if name in key}
        try:
            claims = msgspec.convert(
                jwt.decode(
                    token,
                    jwt.PyJWK(public, algorithm),
                    algorithms=[algorithm],
                    audience=self._audience,
                    issuer=self._issuer,
                    options=_OPTIONS,
                ),
                _Claims,
            )
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise InvalidToken(f"the token: {type(error).__name__}") from None
        now = self._clock()
        if not claims.nbf - LEEWAY_S <= now < claims.exp + LEEWAY_S:  # NaN is no time either
            raise InvalidToken("the token has expired, or is not valid yet")
        return claims

    def _holds_for_s(self, key: Mapping[str, Any], expires_at: float) -> float:
        """A key that was withdrawn takes with it what it has signed."""
        if key not in self._keys:
            return 0.0
        return min(expires_at + LEEWAY_S - self._clock(), RECHECK_S)


def _may_sign(key: Mapping[str, Any], *, algorithm: str) -> bool:
    """Whether a key of a key set is there to sign so: RFC 7517, 4.1 to 4.4."""
    operations = key.get("key_ops", ["verify"])
    return (
        all(key.get(name) == value for name, value in ALGORITHMS[algorithm].items())
        and key.get("alg", algorithm) == algorithm
        and key.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
    )
