//! Log lines of the machine's events.

use holdfast_proto::registrar::Event;
use tracing::{debug, info, warn};

/// Logs an event: as `info` or `warn` if operators should know it, as `debug` if peers or elements can cause it any
/// number of times.
pub(super) fn log_event(event: &Event) {
    match event {
        Event::Ready { elements } => info!(elements, "serving elements and users"),
        Event::PeerUp(peer) => info!(%peer, "a registrar is up"),
        Event::PeerDead(peer) => warn!(%peer, "a registrar does not answer"),
        Event::MentorFailed => warn!("a mentor registrar failed"),
        Event::TakeoverBegun(target) => info!(registrar = %target, "a takeover has started"),
        Event::TakeoverEnded(target) => info!(registrar = %target, "a takeover was given up"),
        Event::TakenOver {
            target,
            by,
            elements,
        } => info!(registrar = %target, %by, elements, "a registrar's elements were taken over"),
        Event::OutOfSync {
            peer,
            announced,
            known,
        } => info!(%peer, announced, known, "checksums differ"),
        Event::Resynchronised { peer, removed } => {
            info!(%peer, removed, "checksums are equal again")
        }
        Event::Inconsistent { handle, id, home } => {
            warn!(%handle, %id, %home, "an element is inconsistent with its pool");
        }
        Event::Registered { handle, id } => debug!(%handle, %id, "registered"),
        Event::Refused { handle, id, cause } => {
            debug!(%handle, %id, ?cause, "a registration was refused");
        }
        Event::Removed {
            handle,
            id,
            reason: why,
        } => debug!(%handle, %id, ?why, "an element was removed"),
        Event::Ignored {
            from,
            protocol,
            reason: why,
        } => debug!(?from, ?protocol, why, "a message was ignored"),
        Event::Aborted {
            association,
            reason: why,
        } => debug!(?association, why, "aborted an association"),
        Event::ErrorReported {
            from,
            protocol,
            causes,
        } => debug!(?from, ?protocol, ?causes, "a peer reports errors"),
    }
}
