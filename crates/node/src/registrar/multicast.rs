//! The multicast groups that the registrar takes part in.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use bytes::Bytes;
use holdfast_proto::registrar::Protocol;
use holdfast_sys::net::Interface;
use holdfast_sys::transport::Multicast;

use crate::config::registrar::RegistrarConfig;

/// Datagrams taken in before the endpoints have their turn.
const BATCH: usize = 64;

/// A group and the protocol spoken there.
struct Group {
    protocol: Protocol,
    member: Multicast,
}

/// At most one group of each protocol.
pub(super) struct Groups(Vec<Group>);

impl Groups {
    /// Joins those that the configuration has a use for.
    ///
    /// # Errors
    /// No such interface, or what the kernel says to joining.
    pub(super) fn join(config: &RegistrarConfig) -> io::Result<Groups> {
        let settings = &config.settings;
        let wanted = [
            (
                Protocol::Asap,
                config.multicast.asap_group,
                settings.announce_cycle.is_some(),
            ),
            (
                Protocol::Enrp,
                config.multicast.enrp_group,
                settings.enrp_multicast,
            ),
        ];
        let indices: io::Result<Vec<u32>> = config
            .multicast
            .interfaces
            .iter()
            .map(|name| Interface::find(name).map(|found| found.index))
            .collect();
        let indices = indices?;
        let mut groups = Vec::new();
        for (protocol, group, is_wanted) in wanted {
            if is_wanted {
                let member = Multicast::join(group, &indices)?;
                groups.push(Group { protocol, member });
            }
        }
        Ok(Groups(groups))
    }

    /// What to wait for.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|group| group.member.fd())
    }

    /// Shows what came, up to a bound.
    pub(super) fn receive(&mut self, mut visit: impl FnMut(SocketAddr, Protocol, &Bytes)) {
        for group in &mut self.0 {
            for _ in 0..BATCH {
                match group.member.receive() {
                    Ok(Some(came)) => {
                        let bytes = Bytes::copy_from_slice(came.bytes);
                        visit(came.from, group.protocol, &bytes);
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "receiving announces");
                        break;
                    }
                }
            }
        }
    }

    /// Sends to the protocol's group, if that is joined.
    pub(super) fn send(&self, protocol: Protocol, message: &[u8]) {
        for group in self.0.iter().filter(|group| group.protocol == protocol) {
            if let Err(error) = group.member.send(message) {
                tracing::debug!(%error, ?protocol, "announcing");
            }
        }
    }
}
