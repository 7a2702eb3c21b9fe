//! Common parts of pool elements and pool users: links, and the server hunt, which is the search for a registrar
//! (RFC 5352 section 3.6).
//!
//! The types are public as part of the machines that use them.

mod config;
mod link;
mod registrar_list;
mod secret_seed_rng;
#[cfg(test)]
mod tests;

pub use config::ServerHuntConfig;
pub use link::{LinkId, Output};
pub(crate) use registrar_list::RegistrarTransports;
pub(crate) use secret_seed_rng::SecretSeedRng;

use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{RegistrarId, Transport};
use registrar_list::KnownRegistrars;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// SH1: "An ASAP Endpoint MUST NOT establish more than three associations or connections."
const PARALLEL_MAX: usize = 3;

/// The current home registrar of an element or a user.
#[derive(Debug)]
struct Home {
    link: LinkId,
    /// Number of the registrar, which only keep-alives and announces name.
    id: Option<RegistrarId>,
    /// Address of the registrar; none if the registrar made the link.
    address: Option<Transport>,
    /// True once a message arrived from the registrar.
    has_spoken: bool,
}

/// An attempt to reach a registrar.
#[derive(Debug)]
struct Attempt {
    address: Transport,
    /// Time at which another registrar is tried.
    until: Duration,
}

#[derive(Debug)]
enum HuntState {
    /// No registrar is wanted.
    Idle,
    /// Attempts are open, until the T5-Serverhunt timer ends them.
    Trying { until: Duration },
    /// All attempts failed; the next round starts at this time.
    Pausing { until: Duration },
    /// A home registrar is connected.
    Home(Home),
}

/// A change for the machine that owns the hunt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HomeChange {
    /// There is a new home registrar.
    Found,
    /// The home registrar was lost.
    Lost,
    /// A round ended without reaching a registrar.
    NotFound,
}

/// The server hunt, and the output queue of the machine that owns it.
#[derive(Debug)]
pub(crate) struct ServerHunt<E> {
    pub(crate) outputs: VecDeque<Output<E>>,
    pub(crate) random: SecretSeedRng,
    config: ServerHuntConfig,
    servers: KnownRegistrars,
    state: HuntState,
    attempts: BTreeMap<LinkId, Attempt>,
    /// Number of failed rounds since the last home: exponent of T5 and of the pause.
    failed_rounds: u32,
    /// Number of home registrars in a row that closed the link without a message: they are no better than unreachable
    /// ones.
    silent_home_count: usize,
    last_link: u64,
}

impl<E> ServerHunt<E> {
    pub(crate) fn new(
        config: ServerHuntConfig,
        seed: [u8; 32],
        reach: RegistrarTransports,
    ) -> ServerHunt<E> {
        ServerHunt {
            outputs: VecDeque::new(),
            random: SecretSeedRng::new(seed),
            servers: KnownRegistrars::new(&config, reach),
            config,
            state: HuntState::Idle,
            attempts: BTreeMap::new(),
            failed_rounds: 0,
            silent_home_count: 0,
            last_link: 0,
        }
    }

    /// Starts the search for a home registrar, unless one is connected or sought already.
    pub(crate) fn start(&mut self, now: Duration) {
        if matches!(self.state, HuntState::Idle) {
            self.start_round(now);
        }
    }

    /// Ends the hunt and leaves the home registrar.
    pub(crate) fn stop(&mut self) {
        self.close_attempts();
        if let HuntState::Home(home) = std::mem::replace(&mut self.state, HuntState::Idle) {
            self.close(home.link);
        }
        self.failed_rounds = 0;
    }

    /// Has the daemon make a link to this address, and returns the link's identifier.
    pub(crate) fn connect(&mut self, to: Transport) -> LinkId {
        self.last_link += 1;
        let link = LinkId::Initiated(self.last_link);
        self.outputs.push_back(Output::Connect { link, to });
        link
    }

    pub(crate) fn close(&mut self, link: LinkId) {
        self.outputs.push_back(Output::Close { link });
    }

    pub(crate) fn send(&mut self, link: LinkId, message: Message) {
        self.outputs.push_back(Output::Send { link, message });
    }

    pub(crate) fn push_event(&mut self, event: E) {
        self.outputs.push_back(Output::Event(event));
    }

    /// Returns the link to the home registrar.
    pub(crate) fn home(&self) -> Option<LinkId> {
        match &self.state {
            HuntState::Home(home) => Some(home.link),
            _ => None,
        }
    }

    /// Returns the home registrar's number, if it has named it.
    pub(crate) fn home_id(&self) -> Option<RegistrarId> {
        match &self.state {
            HuntState::Home(home) => home.id,
            _ => None,
        }
    }

    pub(crate) fn handle_connected(&mut self, link: LinkId) -> Option<HomeChange> {
        let address = self.attempts.remove(&link)?.address;
        // SH6: "The PE or PU shall pick one of the ENRP servers": the first.
        self.close_attempts();
        let id = self.servers.id(&address);
        self.set_home(Home {
            link,
            id,
            address: Some(address),
            has_spoken: false,
        });
        Some(HomeChange::Found)
    }

    /// Notes a message on a link.
    pub(crate) fn note_message(&mut self, link: LinkId) {
        if let HuntState::Home(home) = &mut self.state
            && home.link == link
        {
            home.has_spoken = true;
            self.silent_home_count = 0;
        }
    }

    pub(crate) fn handle_lost(&mut self, now: Duration, link: LinkId) -> Option<HomeChange> {
        if let HuntState::Home(home) = &self.state
            && home.link == link
        {
            self.silent_home_count += usize::from(!home.has_spoken);
            let known_registrars = self.servers.len().max(1);
            let rounds = self.silent_home_count / known_registrars;
            let all_silent =
                !home.has_spoken && self.silent_home_count.is_multiple_of(known_registrars);
            match all_silent {
                true => self.pause_after_silent_homes(now, rounds),
                false => self.seek_new_home(now),
            }
            return Some(HomeChange::Lost);
        }
        // SH4: "If an association or connection establishment fails, the ASAP Endpoint SHOULD try to establish an
        // association or connection using a different transport address."
        self.attempts.remove(&link)?;
        self.continue_round(now)
    }

    /// Tries other registrars in place of failed ones, if any are left in this round.
    fn continue_round(&mut self, now: Duration) -> Option<HomeChange> {
        self.start_attempts(now);
        self.attempts.is_empty().then(|| self.start_pause(now))
    }

    /// Leaves a home registrar that does not answer, and seeks another.
    pub(crate) fn drop_home(&mut self, now: Duration) -> Option<HomeChange> {
        let link = self.home()?;
        self.close(link);
        self.seek_new_home(now);
        Some(HomeChange::Lost)
    }

    /// Makes the registrar at the other end of `link` the home registrar, as it demands.
    pub(crate) fn adopt(&mut self, link: LinkId, id: RegistrarId) -> Option<HomeChange> {
        match &mut self.state {
            HuntState::Home(home) if home.link == link => {
                home.id = Some(id);
                return None;
            }
            HuntState::Home(home) => {
                let old = home.link;
                self.close(old);
            }
            HuntState::Idle | HuntState::Trying { .. } | HuntState::Pausing { .. } => {}
        }
        let address = self.attempts.remove(&link).map(|attempt| attempt.address);
        self.close_attempts();
        let id = Some(id);
        self.set_home(Home {
            link,
            id,
            address,
            has_spoken: true,
        });
        Some(HomeChange::Found)
    }

    /// Handles a registrar's announce. Without transports the registrar is reached at `source` (SCTP, the announce's
    /// own address).
    pub(crate) fn handle_announce(
        &mut self,
        now: Duration,
        id: RegistrarId,
        transports: Vec<Transport>,
        source: Option<Transport>,
    ) {
        if !self.config.trust_announces {
            return;
        }
        let until = now + self.config.announce_life;
        let transports = if transports.is_empty() {
            source.into_iter().collect()
        } else {
            transports
        };
        for transport in transports {
            self.servers.learn_announced(transport, id, until);
        }
        // The announced registrar can be tried, and may be the first one.
        match self.state {
            HuntState::Pausing { .. } => self.start_round(now),
            HuntState::Trying { .. } => self.start_attempts(now),
            HuntState::Idle | HuntState::Home(_) => {}
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Duration) -> Option<HomeChange> {
        self.servers.remove_expired(now);
        match self.state {
            HuntState::Trying { until } if until <= now => {
                // SH5.2: stop the establishment with the transport addresses selected.
                self.close_attempts();
                // SH5.1: T5 doubles; the wait was long enough to start the next round at once.
                self.failed_rounds += 1;
                self.start_round(now);
                Some(HomeChange::NotFound)
            }
            HuntState::Pausing { until } if until <= now => {
                self.start_round(now);
                None
            }
            HuntState::Trying { .. } => self.expire_attempts(now),
            _ => None,
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        match self.state {
            HuntState::Trying { until } => {
                let attempts = self.attempts.values().map(|attempt| attempt.until);
                attempts.chain([until]).min()
            }
            HuntState::Pausing { until } => Some(until),
            HuntState::Idle | HuntState::Home(_) => None,
        }
    }

    /// Ends attempts whose time is over.
    fn expire_attempts(&mut self, now: Duration) -> Option<HomeChange> {
        let expired =
            |(link, attempt): (&LinkId, &Attempt)| (attempt.until <= now).then_some(*link);
        let links: Vec<LinkId> = self.attempts.iter().filter_map(expired).collect();
        if links.is_empty() {
            return None;
        }
        for link in links {
            self.attempts.remove(&link);
            self.close(link);
        }
        self.continue_round(now)
    }

    fn set_home(&mut self, home: Home) {
        self.failed_rounds = 0;
        self.state = HuntState::Home(home);
    }

    /// Seeks a new registrar after the loss of the home registrar, which is tried last.
    fn seek_new_home(&mut self, now: Duration) {
        if let HuntState::Home(Home {
            address: Some(address),
            ..
        }) = &self.state
        {
            self.servers.record_attempt(address);
        }
        self.start_round(now);
    }

    /// Starts a round of attempts (SH1, SH2).
    fn start_round(&mut self, now: Duration) {
        self.servers.remove_expired(now);
        self.servers.start_round();
        let wait = self.config.timeout * self.backoff_factor();
        self.state = HuntState::Trying {
            until: now + wait.min(self.config.timeout_max),
        };
        self.start_attempts(now);
        if self.attempts.is_empty() {
            self.start_pause(now);
        }
    }

    /// Starts as many attempts at once as allowed.
    fn start_attempts(&mut self, now: Duration) {
        let parallel = self.config.parallel.clamp(1, PARALLEL_MAX);
        while self.attempts.len() < parallel {
            let Some(address) = self.servers.choose_next(&mut self.random) else {
                break;
            };
            let link = self.connect(address.clone());
            let until = now + self.config.attempt_timeout;
            self.attempts.insert(link, Attempt { address, until });
        }
    }

    /// Pauses after all registrars have closed their links without a message, for the given number of rounds.
    fn pause_after_silent_homes(&mut self, now: Duration, rounds: usize) {
        let factor = 1 << (rounds - 1).min(16);
        self.state = HuntState::Pausing {
            until: now + (self.config.pause * factor).min(self.config.pause_max),
        };
    }

    fn close_attempts(&mut self) {
        for (link, _) in std::mem::take(&mut self.attempts) {
            self.close(link);
        }
    }

    fn start_pause(&mut self, now: Duration) -> HomeChange {
        let wait = self.config.pause * self.backoff_factor();
        self.failed_rounds += 1;
        self.state = HuntState::Pausing {
            until: now + wait.min(self.config.pause_max),
        };
        HomeChange::NotFound
    }

    fn backoff_factor(&self) -> u32 {
        1 << self.failed_rounds.min(16)
    }
}
