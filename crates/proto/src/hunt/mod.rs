//! Common parts of pool elements and pool users: links, and the server hunt, which is the search for a registrar
//! (RFC 5352 section 3.6).
//!
//! The types are public as part of the machines that use them.

mod config;
mod link;
mod random;
mod servers;
#[cfg(test)]
mod tests;

pub use config::HuntConfig;
pub use link::{Link, Output};
pub(crate) use random::Random;
pub(crate) use servers::Reach;

use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{RegistrarId, Transport};
use servers::Servers;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// SH1: "An ASAP Endpoint MUST NOT establish more than three associations or connections."
const PARALLEL_MAX: usize = 3;

/// The current home registrar.
#[derive(Debug)]
struct Home {
    link: Link,
    /// Its number, which it names only in keep-alives and announces.
    id: Option<RegistrarId>,
    /// Its address; none if the registrar made the link.
    address: Option<Transport>,
    /// True once a message arrived from it.
    heard: bool,
}

/// An attempt to reach a registrar.
#[derive(Debug)]
struct Attempt {
    address: Transport,
    /// Time at which another registrar is tried.
    until: Duration,
}

#[derive(Debug)]
enum State {
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
pub(crate) enum Change {
    /// There is a new home registrar.
    Found,
    /// The home registrar was lost.
    Lost,
    /// A round ended without reaching a registrar.
    NotFound,
}

/// The server hunt, and the output queue of the machine that owns it.
#[derive(Debug)]
pub(crate) struct Hunt<E> {
    pub(crate) outputs: VecDeque<Output<E>>,
    pub(crate) random: Random,
    config: HuntConfig,
    servers: Servers,
    state: State,
    attempts: BTreeMap<Link, Attempt>,
    /// Number of failed rounds since the last home: exponent of T5 and of the pause.
    failed_rounds: u32,
    /// Number of home registrars in a row that closed the link without a message: they are no better than unreachable
    /// ones.
    wordless: usize,
    links: u64,
}

impl<E> Hunt<E> {
    pub(crate) fn new(config: HuntConfig, seed: [u8; 32], reach: Reach) -> Hunt<E> {
        Hunt {
            outputs: VecDeque::new(),
            random: Random::new(seed),
            servers: Servers::new(&config, reach),
            config,
            state: State::Idle,
            attempts: BTreeMap::new(),
            failed_rounds: 0,
            wordless: 0,
            links: 0,
        }
    }

    /// Starts the hunt.
    pub(crate) fn start(&mut self, now: Duration) {
        if matches!(self.state, State::Idle) {
            self.try_some(now);
        }
    }

    /// Ends the hunt and leaves the home registrar.
    pub(crate) fn stop(&mut self) {
        self.abandon();
        if let State::Home(home) = std::mem::replace(&mut self.state, State::Idle) {
            self.close(home.link);
        }
        self.failed_rounds = 0;
    }

    /// Makes a link.
    pub(crate) fn connect(&mut self, to: Transport) -> Link {
        self.links += 1;
        let link = Link::Ours(self.links);
        self.outputs.push_back(Output::Connect { link, to });
        link
    }

    pub(crate) fn close(&mut self, link: Link) {
        self.outputs.push_back(Output::Close { link });
    }

    pub(crate) fn send(&mut self, link: Link, message: Message) {
        self.outputs.push_back(Output::Send { link, message });
    }

    pub(crate) fn event(&mut self, event: E) {
        self.outputs.push_back(Output::Event(event));
    }

    /// Returns the link to the home registrar.
    pub(crate) fn home(&self) -> Option<Link> {
        match &self.state {
            State::Home(home) => Some(home.link),
            _ => None,
        }
    }

    /// Returns the home registrar's number, if it has named it.
    pub(crate) fn home_id(&self) -> Option<RegistrarId> {
        match &self.state {
            State::Home(home) => home.id,
            _ => None,
        }
    }

    pub(crate) fn handle_connected(&mut self, link: Link) -> Option<Change> {
        let address = self.attempts.remove(&link)?.address;
        // SH6: "The PE or PU shall pick one of the ENRP servers": the first.
        self.abandon();
        let id = self.servers.id(&address);
        self.settle(Home {
            link,
            id,
            address: Some(address),
            heard: false,
        });
        Some(Change::Found)
    }

    /// Notes a message on a link.
    pub(crate) fn handle_heard(&mut self, link: Link) {
        if let State::Home(home) = &mut self.state
            && home.link == link
        {
            home.heard = true;
            self.wordless = 0;
        }
    }

    pub(crate) fn handle_lost(&mut self, now: Duration, link: Link) -> Option<Change> {
        if let State::Home(home) = &self.state
            && home.link == link
        {
            self.wordless += usize::from(!home.heard);
            let known = self.servers.len().max(1);
            let rounds = self.wordless / known;
            let in_vain = !home.heard && self.wordless.is_multiple_of(known);
            match in_vain {
                true => self.rest(now, rounds),
                false => self.failed(now),
            }
            return Some(Change::Lost);
        }
        // SH4: "If an association or connection establishment fails, the ASAP Endpoint SHOULD try to establish an
        // association or connection using a different transport address."
        self.attempts.remove(&link)?;
        self.go_on(now)
    }

    /// Tries other registrars in place of failed ones, if any are left in this round.
    fn go_on(&mut self, now: Duration) -> Option<Change> {
        self.fill(now);
        self.attempts.is_empty().then(|| self.pause(now))
    }

    /// Leaves a home registrar that does not answer, and seeks another.
    pub(crate) fn give_home_up(&mut self, now: Duration) -> Option<Change> {
        let link = self.home()?;
        self.close(link);
        self.failed(now);
        Some(Change::Lost)
    }

    /// Makes the registrar at the other end of `link` the home registrar, as it demands.
    pub(crate) fn adopt(&mut self, link: Link, id: RegistrarId) -> Option<Change> {
        match &mut self.state {
            State::Home(home) if home.link == link => {
                home.id = Some(id);
                return None;
            }
            State::Home(home) => {
                let old = home.link;
                self.close(old);
            }
            State::Idle | State::Trying { .. } | State::Pausing { .. } => {}
        }
        let address = self.attempts.remove(&link).map(|attempt| attempt.address);
        self.abandon();
        let id = Some(id);
        self.settle(Home {
            link,
            id,
            address,
            heard: true,
        });
        Some(Change::Found)
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
            self.servers.announced(transport, id, until);
        }
        // The announced registrar can be tried, and may be the first one.
        match self.state {
            State::Pausing { .. } => self.try_some(now),
            State::Trying { .. } => self.fill(now),
            State::Idle | State::Home(_) => {}
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Duration) -> Option<Change> {
        self.servers.forget(now);
        match self.state {
            State::Trying { until } if until <= now => {
                // SH5.2: stop the establishment with the transport addresses selected.
                self.abandon();
                // SH5.1: T5 doubles; the wait was long enough to start the next round at once.
                self.failed_rounds += 1;
                self.try_some(now);
                Some(Change::NotFound)
            }
            State::Pausing { until } if until <= now => {
                self.try_some(now);
                None
            }
            State::Trying { .. } => self.give_attempts_up(now),
            _ => None,
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        match self.state {
            State::Trying { until } => {
                let attempts = self.attempts.values().map(|attempt| attempt.until);
                attempts.chain([until]).min()
            }
            State::Pausing { until } => Some(until),
            State::Idle | State::Home(_) => None,
        }
    }

    /// Ends attempts whose time is over.
    fn give_attempts_up(&mut self, now: Duration) -> Option<Change> {
        let over = |(link, attempt): (&Link, &Attempt)| (attempt.until <= now).then_some(*link);
        let links: Vec<Link> = self.attempts.iter().filter_map(over).collect();
        if links.is_empty() {
            return None;
        }
        for link in links {
            self.attempts.remove(&link);
            self.close(link);
        }
        self.go_on(now)
    }

    fn settle(&mut self, home: Home) {
        self.failed_rounds = 0;
        self.state = State::Home(home);
    }

    /// Seeks a new registrar after the loss of the home registrar, which is tried last.
    fn failed(&mut self, now: Duration) {
        if let State::Home(Home {
            address: Some(address),
            ..
        }) = &self.state
        {
            self.servers.tried(address);
        }
        self.try_some(now);
    }

    /// Starts a round of attempts (SH1, SH2).
    fn try_some(&mut self, now: Duration) {
        self.servers.forget(now);
        self.servers.new_round();
        let wait = self.config.timeout * self.doubled();
        self.state = State::Trying {
            until: now + wait.min(self.config.timeout_max),
        };
        self.fill(now);
        if self.attempts.is_empty() {
            self.pause(now);
        }
    }

    /// Starts as many attempts at once as allowed.
    fn fill(&mut self, now: Duration) {
        let parallel = self.config.parallel.clamp(1, PARALLEL_MAX);
        while self.attempts.len() < parallel {
            let Some(address) = self.servers.next(&mut self.random) else {
                break;
            };
            let link = self.connect(address.clone());
            let until = now + self.config.attempt_timeout;
            self.attempts.insert(link, Attempt { address, until });
        }
    }

    /// Pauses after all registrars have closed their links without a message, for the given number of rounds.
    fn rest(&mut self, now: Duration, rounds: usize) {
        let doubled = 1 << (rounds - 1).min(16);
        self.state = State::Pausing {
            until: now + (self.config.pause * doubled).min(self.config.pause_max),
        };
    }

    fn abandon(&mut self) {
        for (link, _) in std::mem::take(&mut self.attempts) {
            self.close(link);
        }
    }

    fn pause(&mut self, now: Duration) -> Change {
        let wait = self.config.pause * self.doubled();
        self.failed_rounds += 1;
        self.state = State::Pausing {
            until: now + wait.min(self.config.pause_max),
        };
        Change::NotFound
    }

    fn doubled(&self) -> u32 {
        1 << self.failed_rounds.min(16)
    }
}
