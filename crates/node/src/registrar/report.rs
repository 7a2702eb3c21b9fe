//! Log lines of the machine's events.

use holdfast_proto::registrar::Event;
use tracing::{debug, info, warn};

/// Logs an event: as `info` or `warn` if operators should know it, as `debug` if peers or elements can cause it any
/// number of times.
pub(super) fn report(event: &Event) {
    match event {
        Event::Ready { elements } => info!(elements, "serving elements and users"),
        Event::PeerUp(peer) => info!(%peer, "a registrar is there"),
        Event::PeerDead(peer) => warn!(%peer, "a registrar does not answer"),
        Event::MentorFailed => warn!("a registrar to begin with did not help"),
        Event::TakeoverBegun(target) => info!(registrar = %target, "a takeover begins"),
        Event::TakeoverEnded(target) => info!(registrar = %target, "a takeover is given up"),
        Event::TakenOver {
            target,
            by,
            elements,
        } => info!(registrar = %target, %by, elements, "a registrar's elements were taken over"),
        Event::OutOfStep {
            peer,
            announced,
            known,
        } => info!(%peer, announced, known, "checksums differ"),
        Event::InStep { peer, removed } => info!(%peer, removed, "checksums are equal again"),
        Event::Inconsistent { handle, id, home } => {
            warn!(%handle, %id, %home, "an element does not fit into its pool");
        }
        Event::Registered { handle, id } => debug!(%handle, %id, "registered"),
        Event::Refused { handle, id, cause } => {
            debug!(%handle, %id, ?cause, "a registration was refused");
        }
        Event::Removed { handle, id, why } => debug!(%handle, %id, ?why, "an element is gone"),
        Event::Ignored {
            from,
            protocol,
            why,
        } => debug!(?from, ?protocol, why, "a message was ignored"),
        Event::Aborted { association, why } => debug!(?association, why, "aborted"),
        Event::ErrorReported {
            from,
            protocol,
            causes,
        } => debug!(?from, ?protocol, ?causes, "a peer reports errors"),
    }
}
