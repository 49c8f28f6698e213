"""What Bouquet's processes say to each other: messages, codecs, sockets and the shared-memory step ring."""
