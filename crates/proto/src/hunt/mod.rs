//! What pool elements and pool users share: links to others, and the hunt for a registrar (RFC 5352 section 3.6).
//!
//! The types are public as those of the machines that use them.

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

/// The registrar that is asked.
#[derive(Debug)]
struct Home {
    link: Link,
    /// It says who it is in keep-alives and announces only.
    id: Option<RegistrarId>,
    /// Where it was reached; none if it came by itself.
    address: Option<Transport>,
    /// It has said something.
    heard: bool,
}

/// A registrar that is tried.
#[derive(Debug)]
struct Attempt {
    address: Transport,
    /// When another has its turn.
    until: Duration,
}

#[derive(Debug)]
enum State {
    /// Nobody asked for a registrar.
    Idle,
    /// Attempts are under way, until the T5-Serverhunt timer ends them.
    Trying { until: Duration },
    /// All attempts failed; the next round starts then.
    Pausing { until: Duration },
    /// There is a home registrar.
    Home(Home),
}

/// What has changed for the machine that owns the hunt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// There is a home registrar, another than before.
    Found,
    /// There was one and there is none.
    Lost,
    /// A round has ended, no registrar was reached.
    NotFound,
}

/// The hunt, and the queue of outputs of the machine that it is part of.
#[derive(Debug)]
pub(crate) struct Hunt<E> {
    pub(crate) outputs: VecDeque<Output<E>>,
    pub(crate) random: Random,
    config: HuntConfig,
    servers: Servers,
    state: State,
    attempts: BTreeMap<Link, Attempt>,
    /// Rounds that failed since there was a home: what T5 and the pause are doubled by.
    failed_rounds: u32,
    /// Home registrars in a row that hung up without a word: no better than those that are not there.
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

    /// A registrar is wanted from now on.
    pub(crate) fn start(&mut self, now: Duration) {
        if matches!(self.state, State::Idle) {
            self.try_some(now);
        }
    }

    /// None is wanted any more.
    pub(crate) fn stop(&mut self) {
        self.abandon();
        if let State::Home(home) = std::mem::replace(&mut self.state, State::Idle) {
            self.close(home.link);
        }
        self.failed_rounds = 0;
    }

    /// A link of this machine's making.
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

    /// The link to the home registrar.
    pub(crate) fn home(&self) -> Option<Link> {
        match &self.state {
            State::Home(home) => Some(home.link),
            _ => None,
        }
    }

    /// Who the home registrar is, as far as it has said so.
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

    /// Something came over a link.
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

    /// Others instead of those that failed, if there are any left in this round.
    fn go_on(&mut self, now: Duration) -> Option<Change> {
        self.fill(now);
        self.attempts.is_empty().then(|| self.pause(now))
    }

    /// The home registrar does not answer: it is left, and another sought.
    pub(crate) fn give_home_up(&mut self, now: Duration) -> Option<Change> {
        let link = self.home()?;
        self.close(link);
        self.failed(now);
        Some(Change::Lost)
    }

    /// The registrar at the other end of `link` says that it is the home registrar.
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

    /// A registrar announces itself. Without transports it is reached at `source` (SCTP, the announce's own address).
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
        // Somebody to try, where before there may have been nobody.
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
                // SH5.1: T5 doubles; the wait has been long enough for the next round to start at once.
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

    /// Attempts that have had their time end.
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

    /// The home registrar is gone: others first.
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

    /// A round of attempts (SH1, SH2).
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

    /// As many attempts at once as may be.
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

    /// All have hung up, so many times: they are not called again at once.
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
