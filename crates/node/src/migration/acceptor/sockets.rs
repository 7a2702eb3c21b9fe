//! Descriptors and sockets of a process being moved here.

use holdfast_sys::process::image::{Descriptors, decode};
use holdfast_sys::process::sockets::Sockets;
use holdfast_wire::MoveId;
use tokio::sync::oneshot;

use super::super::connections::{States, members, shares_port};
use super::super::pieces::Kind;
use super::super::places::place;
use super::super::told::{Teller, Told};
use super::{RESTORERS, Taking, text};
use crate::dataplane::shared_ports::{self, Shared};
use crate::dataplane::timeouts;

impl Taking {
    pub(super) fn descriptors(&mut self, kind: Kind, message: &[u8]) -> Result<(), String> {
        let found: Descriptors = decode(message).map_err(text)?;
        self.policy.check_descriptors(&found)?;
        if !self.refusals.is_empty() {
            return Ok(());
        }
        if self.sockets.is_none() {
            let first_port = self.policy.judge().first_port();
            self.sockets = Some(Sockets::new(first_port).map_err(|error| error.to_string())?);
            // Loaded before the freeze, which the loading would lengthen.
            timeouts::load();
        }
        if found.sockets.values().any(shares_port) {
            shared_ports::load();
        }
        let (Some(sockets), Some(restorer)) = (&mut self.sockets, &mut self.restorer) else {
            return Err("descriptors came before the shape of their tree".to_owned());
        };
        expect(&self.teller, self.id, &found);
        let prepared = sockets.prepare(&found.sockets, &found.gone);
        prepared.map_err(|error| error.to_string())?;
        match kind {
            Kind::LastDescriptors => restorer.last_descriptors(&found, &sockets.fresh()),
            _ => restorer.descriptors(&found, &sockets.fresh()),
        }
        .map_err(text)?;
        sockets.handed_over();
        Ok(())
    }

    pub(super) fn give_states(&mut self, kind: Kind, given: States) -> Result<(), String> {
        let sockets = self
            .sockets
            .as_mut()
            .ok_or("their state came before sockets")?;
        let States {
            at_us,
            states,
            clients,
            programs,
        } = given;
        self.policy.judge().states(&states)?;
        let packets = match kind {
            Kind::Seen => sockets
                .inject(states, at_us, RESTORERS)
                .map(|()| Vec::new()),
            Kind::Sockets => sockets.restore_some(states, RESTORERS),
            _ => sockets.restore_changed(states, at_us, RESTORERS),
        };
        let packets = packets.map_err(|error| error.to_string())?;
        let shared = Shared { clients, programs };
        shared_ports::give(&members(sockets.iter()), &shared)?;
        if !packets.is_empty() {
            let id = self.id;
            self.teller.tell(Told::Packets { id, packets });
        }
        Ok(())
    }
}

/// Waits until new clients of the sockets about to be made are redirected to the donor, where the program still runs.
fn expect(teller: &Teller, id: MoveId, found: &Descriptors) {
    let places = found.sockets.values().filter_map(place);
    let servers: Vec<_> = places.filter(|place| place.remote.is_none()).collect();
    if servers.is_empty() {
        return;
    }
    let (reply, expected) = oneshot::channel();
    teller.tell(Told::Expected { id, servers, reply });
    // If the daemon is ending, no client is redirected.
    let _ = expected.blocking_recv();
}
