//! Masks for common servers.

use super::{Mask, MaskPattern, MaskStep, VaryingMessageType};

impl Mask {
    /// Returns the mask of the initial handshake packet of MariaDB and MySQL (MariaDB's client/server protocol, "Initial
    /// handshake packet"). Thread number and both parts of the scramble may differ. An error packet is compared.
    pub fn mariadb_greeting() -> Mask {
        let steps = vec![
            // Length of the packet and its number.
            MaskStep::Compared { bytes: 4 },
            // Version of the protocol.
            MaskStep::Expected { byte: 10 },
            // Version of the server.
            MaskStep::Through { byte: 0 },
            // Number of the thread, first part of the scramble.
            MaskStep::Masked { bytes: 4 + 8 },
            // A zero, capabilities, collation, status, capabilities, length of the scramble, filler and capabilities.
            MaskStep::Compared {
                bytes: 1 + 2 + 1 + 2 + 2 + 1 + 10,
            },
            // Second part of the scramble. A zero and the name of the plugin follow.
            MaskStep::Masked { bytes: 12 },
        ];
        Mask {
            steps,
            patterns: Vec::new(),
        }
    }

    /// Returns the mask of the messages of PostgreSQL up to the first `ReadyForQuery` (PostgreSQL's frontend/backend
    /// protocol, "Message Formats"). The salt or nonce of an authentication request may differ, and so may the process
    /// number and key of `BackendKeyData`. A refusal of encryption (`N`) may come first.
    pub fn postgresql_greeting() -> Mask {
        let masked = vec![
            // The kind of the request is compared.
            VaryingMessageType {
                kind: b'R',
                compared: 4,
            },
            VaryingMessageType {
                kind: b'K',
                compared: 0,
            },
        ];
        let steps = vec![
            MaskStep::RunOf { byte: b'N' },
            MaskStep::Messages { masked, last: b'Z' },
        ];
        Mask {
            steps,
            patterns: Vec::new(),
        }
    }

    /// Returns the mask of the field `Date` of HTTP/1.1 in its preferred form of 29 characters (RFC 9110, section 5.6.7).
    pub fn http_date() -> Mask {
        let pattern = MaskPattern {
            text: b"\r\nDate: ".to_vec(),
            masked: 29,
        };
        Mask::new(Vec::new(), vec![pattern]).unwrap_or_default()
    }
}
