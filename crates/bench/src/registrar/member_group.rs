//! Elements or users of one registrar: a separate process with an association for each.
//!
//! The process connects, registers (elements), prints `ready`, and then executes the lines of its input:
//! `go MICROSECONDS` (each member sends one request per interval; with 0, as soon as it has its answer), `count`,
//! `stop` (and wait for outstanding answers), `leave` (deregister). Each line is answered by a line of [`RequestCounts`].

use std::collections::HashMap;
use std::io::{BufRead, stdin};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_sctp::{
    self, AssocId, MessageToSend, TransportConfig, TransportEndpoint, TransportEvent,
};
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use super::messages::{self, PoolMessages};
use super::request_schedule::RequestSchedule;
use super::role_process::pin_to_processor;

/// Time limit for the start of associations, and for answers; a registrar may have much work.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Most associations and first registrations in progress, because a lost packet is only repeated after a timeout.
const IN_PROGRESS_MAX: usize = 64;

/// Kind of the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MemberKind {
    /// Register repeatedly.
    Elements,
    /// Resolve a pool handle.
    Users,
}

/// A group, as flags of a hidden command.
#[derive(Clone, Debug, clap::Args)]
pub struct MemberGroupArgs {
    /// Kind of the members.
    #[arg(long)]
    pub kind: MemberKind,
    /// Number of members.
    #[arg(long)]
    pub count: usize,
    /// ASAP address of the registrar.
    #[arg(long)]
    pub server: SocketAddr,
    /// UDP port of the registrar, 0 for SCTP directly over IP.
    #[arg(long)]
    pub encapsulation: u16,
    /// The processor to run on.
    #[arg(long)]
    pub processor: usize,
    /// Handle of the pool.
    #[arg(long)]
    pub handle: String,
    /// Policy of the pool.
    #[arg(long)]
    pub policy: PolicyKind,
    /// Elements requested per answer.
    #[arg(long)]
    pub items: Option<u32>,
}

/// Counters of a group since its `ready`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RequestCounts {
    /// Requests that the group has sent.
    pub sent: u64,
    /// Requests answered, all without an error.
    pub answered: u64,
}

/// Runs the hidden role of a group of elements or users.
///
/// # Errors
/// Associations cannot be established or fail, or an answer is invalid.
pub fn run(args: &MemberGroupArgs) -> Result<()> {
    pin_to_processor(args.processor)?;
    // With the default slack, the kernel wakes the process 50 us late, with several requests due at once.
    nix::sys::prctl::set_timerslack(1)?;
    let mut group = MemberGroup::connect(args)?;
    group.register_elements()?;
    group.counts = RequestCounts::default();
    println!("ready");
    loop {
        if group.run_once()? {
            let mut line = String::new();
            stdin().lock().read_line(&mut line)?;
            if line.is_empty() {
                return Ok(());
            }
            group.execute_command(line.trim())?;
            println!("{}", serde_json::to_string(&group.counts)?);
        }
    }
}

struct MemberGroup {
    kind: MemberKind,
    endpoint: Box<dyn TransportEndpoint>,
    pool: PoolMessages,
    own_address: IpAddr,
    /// Associations by member.
    associations: Vec<AssocId>,
    member_by_association: HashMap<AssocId, usize>,
    requests: Vec<MessageToSend>,
    schedule: RequestSchedule,
    counts: RequestCounts,
    unanswered: usize,
    /// First byte of the expected answer, and the length of one that was fully parsed.
    expected_type: u8,
    answer_len: usize,
    events: Vec<TransportEvent>,
    random: SmallRng,
}

impl MemberGroup {
    fn connect(args: &MemberGroupArgs) -> Result<Self> {
        let own_address = address_towards(args.server)?;
        let encapsulation = Some(args.encapsulation).filter(|&port| port > 0);
        let config = TransportConfig {
            listen: false,
            raw: encapsulation.is_none(),
            encapsulation: encapsulation.map(|_| 0),
            outbound_streams: 1,
            ..TransportConfig::new(vec![SocketAddr::new(own_address, 0)])
        };
        let mut group = Self {
            kind: args.kind,
            endpoint: holdfast_sctp::open(&config).context("open an SCTP endpoint")?,
            pool: PoolMessages {
                handle: PoolHandle::from(args.handle.as_str()),
                policy: args.policy,
                items: args.items,
            },
            own_address,
            associations: Vec::new(),
            member_by_association: HashMap::new(),
            requests: Vec::new(),
            schedule: RequestSchedule::Stopped,
            counts: RequestCounts::default(),
            unanswered: 0,
            expected_type: 0,
            answer_len: 0,
            events: Vec::new(),
            random: SmallRng::seed_from_u64(u64::from(std::process::id())),
        };
        group.open_associations(args, encapsulation)?;
        Ok(group)
    }

    fn open_associations(
        &mut self,
        args: &MemberGroupArgs,
        encapsulation: Option<u16>,
    ) -> Result<()> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut up = 0;
        while up < args.count {
            ensure!(
                Instant::now() < deadline,
                "exceeded time: no association with {} within a minute",
                args.server
            );
            while self.associations.len() < args.count.min(up + IN_PROGRESS_MAX) {
                let assoc = self
                    .endpoint
                    .connect_from_new_port(&[args.server], encapsulation)?;
                self.associations.push(assoc);
            }
            self.wait(Some(deadline))?;
            for event in std::mem::take(&mut self.events) {
                match event {
                    TransportEvent::Up { .. } => up += 1,
                    // A handshake may time out on a busy machine: repeat until the deadline.
                    TransportEvent::Down { assoc, .. } => {
                        let place = self.associations.iter().position(|one| *one == assoc);
                        let place = place.context("an unknown association is down")?;
                        let again = self
                            .endpoint
                            .connect_from_new_port(&[args.server], encapsulation)?;
                        self.associations[place] = again;
                    }
                    _ => {}
                }
            }
        }
        self.member_by_association = (0..)
            .zip(&self.associations)
            .map(|(place, assoc)| (*assoc, place))
            .collect();
        Ok(())
    }

    /// Registers the elements; users send nothing before their first request.
    fn register_elements(&mut self) -> Result<()> {
        let places = 0..self.associations.len();
        match self.kind {
            MemberKind::Elements => {
                let at = self.own_address;
                let random = &mut self.random;
                let one = |place| self.pool.registration(place, at, random);
                self.requests = places.map(one).collect::<Result<_>>()?;
                self.expected_type = messages::REGISTRATION_RESPONSE;
                self.request_once_each()
            }
            MemberKind::Users => {
                self.requests = vec![self.pool.resolution()?; places.len()];
                self.expected_type = messages::HANDLE_RESOLUTION_RESPONSE;
                Ok(())
            }
        }
    }

    /// Sends one request for each member, and waits for the answers.
    fn request_once_each(&mut self) -> Result<()> {
        for place in 0..self.associations.len() {
            self.send_request(place)?;
            self.read_answers(IN_PROGRESS_MAX)?;
        }
        self.read_answers(0)
    }

    /// Reads answers until at most `outstanding_max` are outstanding.
    fn read_answers(&mut self, outstanding_max: usize) -> Result<()> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        while self.unanswered > outstanding_max {
            let late = self.unanswered;
            ensure!(
                Instant::now() < deadline,
                "exceeded time: {late} requests have no answer"
            );
            self.wait(Some(deadline))?;
            self.handle_events()?;
        }
        Ok(())
    }

    fn execute_command(&mut self, line: &str) -> Result<()> {
        match line.split_once(' ') {
            Some(("go", interval)) => {
                let interval = Duration::from_micros(interval.parse()?);
                self.schedule =
                    RequestSchedule::new(interval, self.associations.len(), &mut self.random);
                if matches!(self.schedule, RequestSchedule::Saturating) {
                    (0..self.associations.len()).try_for_each(|place| self.send_request(place))?;
                }
                Ok(())
            }
            None if line == "count" => Ok(()),
            None if line == "stop" => {
                self.schedule = RequestSchedule::Stopped;
                self.read_answers(0)
            }
            None if line == "leave" => self.deregister_elements(),
            _ => bail!("unknown command: {line}"),
        }
    }

    fn deregister_elements(&mut self) -> Result<()> {
        self.schedule = RequestSchedule::Stopped;
        self.read_answers(0)?;
        if self.kind == MemberKind::Elements {
            let places = 0..self.associations.len();
            let one = |place| self.pool.deregistration(place);
            self.requests = places.map(one).collect::<Result<_>>()?;
            (self.expected_type, self.answer_len) = (messages::DEREGISTRATION_RESPONSE, 0);
            self.request_once_each()?;
        }
        Ok(())
    }

    fn send_request(&mut self, place: usize) -> Result<()> {
        if self.pool.has_changing_policy() && self.expected_type == messages::REGISTRATION_RESPONSE
        {
            let at = self.own_address;
            self.requests[place] = self.pool.registration(place, at, &mut self.random)?;
        }
        let request = &self.requests[place];
        let sent = self.endpoint.send(self.associations[place], request);
        sent.context("cannot send a request; too many are unanswered")?;
        self.counts.sent += 1;
        self.unanswered += 1;
        Ok(())
    }

    /// Sends due requests, waits for an event, and handles it. Returns true if there is a line to read.
    fn run_once(&mut self) -> Result<bool> {
        let now = Instant::now();
        while let Some(place) = self.schedule.pop_due(now) {
            self.send_request(place)?;
        }
        let line = self.wait(self.schedule.next())?;
        self.handle_events()?;
        Ok(line)
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<bool> {
        self.endpoint.flush()?;
        let input = stdin();
        let mut waited = [
            PollFd::new(self.endpoint.fd(), PollFlags::POLLIN),
            PollFd::new(input.as_fd(), PollFlags::POLLIN),
        ];
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        ppoll(&mut waited, timeout.map(TimeSpec::from), None)?;
        let [has_event, line] = waited.map(|fd| fd.any() == Some(true));
        if has_event {
            self.endpoint.recv_batch(&mut self.events)?;
        }
        Ok(line)
    }

    fn handle_events(&mut self) -> Result<()> {
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            match event {
                TransportEvent::Message { assoc, message } => self.on_message(assoc, &message)?,
                TransportEvent::Up { .. } | TransportEvent::Path { .. } => {}
                // A failed send precedes the end of its association, which has the reason.
                TransportEvent::SendFailed { .. } => {}
                other => bail!("an association failed: {other:?}"),
            }
        }
        self.events = events;
        Ok(())
    }

    fn on_message(&mut self, from: AssocId, message: &MessageToSend) -> Result<()> {
        let place = *self
            .member_by_association
            .get(&from)
            .context("received a message from an unknown association")?;
        let bytes = &message.data;
        match (bytes.first(), bytes.get(1)) {
            // The lowest flag means a refusal, or has no use here.
            (Some(&kind), Some(flags)) if kind == self.expected_type && flags & 1 == 0 => {
                if bytes.len() != self.answer_len {
                    messages::check_answer(bytes)?;
                    self.answer_len = bytes.len();
                }
                self.counts.answered += 1;
                self.unanswered -= 1;
                if matches!(self.schedule, RequestSchedule::Saturating) {
                    self.send_request(place)?;
                }
                Ok(())
            }
            (Some(&messages::ENDPOINT_KEEP_ALIVE), _) => {
                let answer = messages::keep_alive_ack(bytes, place)?;
                Ok(self.endpoint.send(from, &answer)?)
            }
            (Some(&messages::ERROR), _) => bail!("the registrar reports an error: {bytes:?}"),
            _ => messages::check_answer(bytes),
        }
    }
}

/// Returns this host's address on the route to another host.
pub(super) fn address_towards(server: SocketAddr) -> Result<IpAddr> {
    let unspecified = if server.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(unspecified)?;
    socket
        .connect(server)
        .with_context(|| format!("no route to {server}"))?;
    Ok(socket.local_addr()?.ip())
}
