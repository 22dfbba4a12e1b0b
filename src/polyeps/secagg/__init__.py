"""Secure sums: the server learns the sum of clients' vectors modulo 2^bits and who is in it, and nothing else.

The protocol is that of Bonawitz et al. (2017), with self-masks, signed keys and the consistency check. Each pair of
clients agrees on a mask that one adds and the other subtracts; each client adds one of its own besides. Shares of the
secrets behind the masks let the server take off what is left when clients drop out.

It holds against a server that lies about keys, about dropouts and about the clients in the sum, together with
`colluders` clients: they learn the sum over the honest clients of one list of at least `least`, no more. Different
letters to different clients do not help either: a vector is masked with all clients that sent its client a letter, at
least `least` with itself, and that many always include one that signed the list and so masked with all clients on it.

It does not hold against a server that makes up clients (identities must be known beforehand by another way). It does
not hide who took part, nor show whether a vector is honest: one client can spoil a sum, and one client or the server
can stop it. The noise inside the vectors must hide what the sum itself reveals.

Up to some hundred clients everybody works with everybody. In larger sums a client shares secrets and masks with a few
neighbours on a fixed circle, more of them than may be missing and collude together (`neighbours`); the list of a sum
and its signatures are everybody's. Then the server learns the sum over a set that has every honest client that signed
the list, of whom there are at least `least` less the colluders.
"""
