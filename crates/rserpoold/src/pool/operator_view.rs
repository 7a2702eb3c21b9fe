//! The operator's view.

use std::net::SocketAddr;

use holdfast_api::control::{OwnElement, OwnElementList, PoolDaemonStatus};

use super::event_loop::PoolEventLoop;
use crate::api_conversion::{sctp_provider, transport_entry};

impl PoolEventLoop {
    /// Returns the daemon's status.
    pub(super) fn status(&self) -> PoolDaemonStatus {
        let registrars = self.config.known_registrars();
        PoolDaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.now().as_secs(),
            sctp: sctp_provider(),
            raw: self.endpoints.own().is_raw(),
            encapsulation_port: self.endpoints.own().encapsulation_port(),
            asap: self.endpoints.own().local_addresses().unwrap_or_default(),
            registrars: registrars.iter().map(ToString::to_string).collect(),
            announces: self.config.announces.trusted,
            home: self.users.machine().home().map(|id| id.to_string()),
            associations: self.links.len() as u64,
            elements: self.elements.len() as u64,
            sessions: self.users.len() as u64,
        }
    }

    /// Returns the elements of this host's programs.
    pub(super) fn own_elements(&self) -> OwnElementList {
        let elements = self.elements.iter().map(|element| {
            let (transport, addresses): (&str, Vec<SocketAddr>) =
                transport_entry(&element.transport);
            let service = element.service.as_ref();
            OwnElement {
                handle: element.handle.to_string(),
                id: element.machine.id().to_string(),
                registered: element.machine.is_registered(),
                home: element.machine.home().map(|id| id.to_string()),
                transport: transport.to_owned(),
                addresses,
                sessions: service.map_or(0, |service| service.user_count() as u64),
            }
        });
        OwnElementList {
            elements: elements.collect(),
        }
    }
}
