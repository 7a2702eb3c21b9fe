//! Multicast groups of an event loop.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use bytes::Bytes;
use holdfast_sctp::MulticastSocket;
use holdfast_sys::net::Interface;

/// Maximum number of datagrams received before other sockets have their turn.
const BATCH_DATAGRAMS_MAX: usize = 64;

/// A group with its protocol.
struct MulticastGroup<P> {
    protocol: P,
    socket: MulticastSocket,
}

/// The joined groups, each with its protocol.
pub(crate) struct MulticastGroups<P>(Vec<MulticastGroup<P>>);

impl<P: Copy + PartialEq + std::fmt::Debug> MulticastGroups<P> {
    /// Joins groups on the named interfaces; without names, on the interface that the routing table gives.
    ///
    /// # Errors
    /// Unknown interface, or the kernel's refusal to join.
    pub(crate) fn join(
        wanted: &[(P, SocketAddr)],
        interfaces: &[String],
    ) -> io::Result<MulticastGroups<P>> {
        let index = |name: &String| Interface::find(name).map(|found| found.index);
        let indices: Vec<u32> = interfaces.iter().map(index).collect::<io::Result<_>>()?;
        let join = |&(protocol, group): &(P, SocketAddr)| {
            let member = MulticastSocket::join(group, &indices)?;
            Ok(MulticastGroup {
                protocol,
                socket: member,
            })
        };
        Ok(MulticastGroups(
            wanted.iter().map(join).collect::<io::Result<_>>()?,
        ))
    }

    /// Returns the descriptors to wait for.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|group| group.socket.fd())
    }

    /// Passes received datagrams to `visit`, up to a limit.
    pub(crate) fn receive(&mut self, mut visit: impl FnMut(SocketAddr, P, &Bytes)) {
        for group in &mut self.0 {
            for _ in 0..BATCH_DATAGRAMS_MAX {
                match group.socket.receive() {
                    Ok(Some(came)) => {
                        let bytes = Bytes::copy_from_slice(came.bytes);
                        visit(came.from, group.protocol, &bytes);
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "cannot receive announcements");
                        break;
                    }
                }
            }
        }
    }

    /// Sends to the protocol's group, if joined.
    pub(crate) fn send(&self, protocol: P, message: &[u8]) {
        for group in self.0.iter().filter(|group| group.protocol == protocol) {
            if let Err(error) = group.socket.send(message) {
                tracing::debug!(%error, ?protocol, "cannot send an announcement");
            }
        }
    }
}
