"""Authentication of callers by bearer tokens.

`bearer` looks at requests and refuses those without a valid token. It knows two kinds, each in a
module that is imported only where it is used: tokens that this server has made (`tokens`), and JWTs
that an issuer has signed (`jwt`, with the issuer's keys in `jwks`). `metadata` tells clients where
to get a token.
"""
