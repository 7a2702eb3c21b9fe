//! The kinds of servers in a fleet.

use anyhow::Result;
use holdfast_api::Protocol;
use serde::Serialize;

use crate::connection_load::RequestProtocol;
use crate::openarena::GameFiles;
use crate::programs::{
    MEMCACHED_PROTOCOL, NGINX_PROTOCOL, ProgramSetup, REDIS_PROTOCOL, WEBSOCKET_PROTOCOL,
    find_program_spec,
};

/// Players of each game server.
pub(super) const PLAYERS: u16 = 2;
/// Snapshots of a game server per second.
pub(super) const SNAPSHOTS_PER_S: u32 = 20;

/// Kind of a server, as Debian ships it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerKind {
    /// `redis-server`.
    Redis,
    /// nginx with two workers.
    Nginx,
    /// A WebSocket server of Node.js with the package `node-ws`.
    WebSocket,
    /// OpenArena's dedicated server, with players.
    OpenArena,
    /// memcached.
    Memcached,
}

impl ServerKind {
    /// Returns four kinds that this machine can have: memcached takes the place of OpenArena where its files are missing.
    #[must_use]
    pub fn four_kinds() -> [ServerKind; 4] {
        let fourth = match GameFiles::find() {
            Ok(_) => ServerKind::OpenArena,
            Err(_) => ServerKind::Memcached,
        };
        [
            ServerKind::Redis,
            ServerKind::Nginx,
            ServerKind::WebSocket,
            fourth,
        ]
    }

    /// Returns the name of the kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ServerKind::Redis => "redis",
            ServerKind::Nginx => "nginx",
            ServerKind::WebSocket => "websocket",
            ServerKind::OpenArena => "openarena",
            ServerKind::Memcached => "memcached",
        }
    }

    /// Returns the transport of the service.
    pub(super) fn transport(self) -> Protocol {
        match self {
            ServerKind::OpenArena => Protocol::Udp,
            _ => Protocol::Tcp,
        }
    }

    /// Returns the protocol of clients that compare every byte; none for a game, which has players.
    pub(super) fn client_protocol(self) -> Option<RequestProtocol> {
        match self {
            ServerKind::Redis => Some(REDIS_PROTOCOL),
            ServerKind::Nginx => Some(NGINX_PROTOCOL),
            ServerKind::WebSocket => Some(WEBSOCKET_PROTOCOL),
            ServerKind::Memcached => Some(MEMCACHED_PROTOCOL),
            ServerKind::OpenArena => None,
        }
    }

    /// Creates the files of a server, and returns the words of its command, as arguments of `env`.
    ///
    /// # Errors
    /// The server is not installed, or a file cannot be written.
    pub(super) fn prepare(self, setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
        if self != ServerKind::OpenArena {
            return (find_program_spec(self.name())?.prepare)(setup);
        }
        let (host, port) = (setup.address.ip().to_string(), setup.address.port());
        let game = GameFiles::find()?;
        let seats = usize::from(PLAYERS);
        let mut words = game.prepare_server(setup.folder, port, seats, SNAPSHOTS_PER_S)?;
        words.extend(["+set", "net_ip", &host].map(str::to_owned));
        Ok(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_with_a_client_protocol_is_in_the_table() {
        let kinds = [
            ServerKind::Redis,
            ServerKind::Nginx,
            ServerKind::WebSocket,
            ServerKind::Memcached,
        ];
        for kind in kinds {
            assert!(kind.client_protocol().is_some(), "{kind:?}");
            assert_eq!(find_program_spec(kind.name()).unwrap().name, kind.name());
        }
    }
}
