//! A pool element's side of ASAP (RFC 5352 sections 3.1, 3.2, 3.4 and 3.6): one machine for each element, and
//! [`UserSessions`] for the control channels to its users.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//! The machine learns of a link made by a registrar from the first message on it; the daemon admits only trusted
//! registrars.
//!
//! Only one request is open at a time, and the machine leaves a registrar that does not answer. A response therefore
//! always belongs to the last request, although messages have no numbers.

mod config;
mod cookie;
mod event;
mod registration;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod tests;
mod user_sessions;

pub use crate::registration_life::LifeUnit;
pub use crate::server_hunt::{LinkId, Output as LinkOutput, ServerHuntConfig};
pub use config::PoolElementConfig;
pub use cookie::{CookieError, CookieKey};
pub use event::{DeregistrationResult, Event, PolicyKindMismatch, RegistrationRefusal};
pub use user_sessions::{SessionOutput, UserSessionEvent, UserSessions, UserSessionsConfig};

use crate::server_hunt::{HomeChange, RegistrarTransports, ServerHunt};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, Policy, RegistrarId, Transport};
use registration::{RegistrationGoal, RegistrationRequestKind, RegistrationState};
use std::time::Duration;

/// An action that the pool element's machine asks of the daemon.
pub type Output = LinkOutput<Event>;

/// A pool element; see the module documentation.
#[derive(Debug)]
pub struct PoolElement {
    config: PoolElementConfig,
    hunt: ServerHunt<Event>,
    registration: RegistrationState,
}

impl PoolElement {
    /// Returns an idle machine.
    pub fn new(config: PoolElementConfig) -> PoolElement {
        let mut hunt = ServerHunt::new(config.hunt.clone(), config.seed, RegistrarTransports::Sctp);
        // R2.2: "Fill in the PE identifier using a good-quality randomly generated number".
        let id = ElementId(hunt.random.next_u32());
        PoolElement {
            registration: RegistrationState::new(id, config.policy),
            config,
            hunt,
        }
    }

    /// Registers the element and keeps it registered. The daemon also calls this function after [`Event::RegistrationRefused`],
    /// once the error is corrected.
    pub fn handle_register(&mut self, now: Duration) {
        if self.registration.goal == RegistrationGoal::Unregistered {
            self.registration.goal = RegistrationGoal::Registered;
            self.registration.conflicts = 0;
            self.registration.registration_due = now;
        }
        self.hunt.start(now);
        self.pursue_registration_goal(now);
    }

    /// Reports the element's current policy values to the registrar. Of several calls in a short time, only the last is
    /// sent.
    ///
    /// # Errors
    /// If the policy is of another kind than the registration's; nothing is changed.
    pub fn handle_policy(
        &mut self,
        now: Duration,
        policy: Policy,
    ) -> Result<(), PolicyKindMismatch> {
        let (has, wanted) = (self.registration.policy.kind(), policy.kind());
        if has != wanted {
            return Err(PolicyKindMismatch { has, wanted });
        }
        self.registration.policy = policy;
        self.pursue_registration_goal(now);
        Ok(())
    }

    /// Removes the element from its pool; [`Event::Deregistered`] follows. Users that know the element may still connect for a
    /// while.
    pub fn handle_deregister(&mut self, now: Duration) {
        if self.registration.goal == RegistrationGoal::Leaving {
            return;
        }
        self.registration.goal = RegistrationGoal::Leaving;
        self.registration.pending_request = None;
        self.registration.deregistration_deadline = Some(now + self.config.deregistration_timeout);
        self.pursue_registration_goal(now);
    }

    /// Handles the success of a [`LinkOutput::Connect`].
    pub fn handle_connected(&mut self, now: Duration, link: LinkId) {
        let change = self.hunt.handle_connected(link);
        if change == Some(HomeChange::Found) {
            // "After establishing a new Home ENRP server, the PE SHOULD restart the registration procedure."
            self.registration.registration_due = now;
        }
        self.on_home_change(change);
        self.pursue_registration_goal(now);
    }

    /// Handles a link that could not be made, or was lost. The daemon treats a link with an undeliverable message as
    /// lost, and closes it.
    pub fn handle_lost(&mut self, now: Duration, link: LinkId) {
        let change = self.hunt.handle_lost(now, link);
        self.on_home_change(change);
        self.pursue_registration_goal(now);
    }

    /// Handles a registrar's multicast announce, with the fields of `Message::ServerAnnounce`; `source` is the
    /// datagram's source address, with ASAP's port.
    pub fn handle_announce(
        &mut self,
        now: Duration,
        registrar: RegistrarId,
        transports: Vec<Transport>,
        source: Option<Transport>,
    ) {
        self.hunt
            .handle_announce(now, registrar, transports, source);
        self.pursue_registration_goal(now);
    }

    /// Handles a message from a registrar.
    pub fn handle_message(&mut self, now: Duration, link: LinkId, message: Message) {
        self.hunt.note_message(link);
        match message {
            Message::EndpointKeepAlive {
                home,
                registrar,
                handle,
                id,
            } if handle == self.config.handle && id.is_none_or(|id| id == self.registration.id) => {
                // KA1: "If the Pool Handle does not match, the PE MUST silently discard the message."
                self.on_keep_alive(link, home, registrar);
            }
            Message::RegistrationResponse {
                rejected,
                handle,
                id,
                causes,
            } if self.is_expected_response(
                link,
                &handle,
                id,
                RegistrationRequestKind::Register,
            ) =>
            {
                self.on_registration_response(now, rejected, causes);
            }
            Message::DeregistrationResponse { handle, id, causes }
                if self.is_expected_response(
                    link,
                    &handle,
                    id,
                    RegistrationRequestKind::Deregister,
                ) =>
            {
                self.finish_deregistration(if causes.is_empty() {
                    DeregistrationResult::Confirmed
                } else {
                    DeregistrationResult::Refused(causes)
                });
            }
            Message::DeregistrationResponse { handle, id, .. }
                if self.hunt.home() == Some(link)
                    && self.is_own_element(&handle, id)
                    && self.registration.goal == RegistrationGoal::Registered =>
            {
                // The response may also be "due to the expiration of the registration life of the PE in the pool"
                // (section 2.2.4).
                self.on_expired(now);
            }
            Message::Error(causes) if self.hunt.home() == Some(link) => {
                self.hunt.push_event(Event::ErrorReported(causes));
            }
            _ => {}
        }
        self.pursue_registration_goal(now);
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        let change = self.hunt.handle_timeout(now);
        self.on_home_change(change);
        self.on_registration_timeout(now);
        self.pursue_registration_goal(now);
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.hunt.outputs.pop_front()
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let hunt = self.hunt.poll_timeout();
        hunt.into_iter().chain(self.registration_timers()).min()
    }

    /// Returns the element's identifier. The identifier changes if another element of the pool has it.
    pub fn id(&self) -> ElementId {
        self.registration.id
    }

    /// Returns true if a registrar has the element in its handlespace, as far as known here.
    pub fn is_registered(&self) -> bool {
        self.registration.accepted.is_some()
    }

    /// Returns the home registrar's number, if there is one and it has named its number.
    pub fn home(&self) -> Option<RegistrarId> {
        self.hunt.home_id()
    }

    fn on_keep_alive(&mut self, link: LinkId, home: bool, registrar: RegistrarId) {
        // An element answers even while its registration is open. One that never registered, or is leaving, does not
        // answer, so that the registrar removes it.
        if self.registration.goal != RegistrationGoal::Registered || !self.registration.may_be_known
        {
            return;
        }
        self.hunt.send(
            link,
            Message::EndpointKeepAliveAck {
                handle: self.config.handle.clone(),
                id: self.registration.id,
            },
        );
        // KA2.4: "adopt the sender of the ASAP_ENDPOINT_KEEP_ALIVE message as the new Home ENRP server".
        if home {
            let change = self.hunt.adopt(link, registrar);
            self.on_home_change(change);
        }
    }

    fn on_home_change(&mut self, change: Option<HomeChange>) {
        let event = match change {
            Some(HomeChange::Found) => Event::NewHome {
                registrar: self.hunt.home_id(),
            },
            Some(HomeChange::Lost) => Event::HomeLost,
            Some(HomeChange::NotFound) => Event::NoRegistrar,
            None => return,
        };
        if event != Event::NoRegistrar {
            // An open request to the old registrar is repeated to the new one.
            self.registration.pending_request = None;
        }
        self.hunt.push_event(event);
    }
}
