//! A bare SCTP echo: the capacity of the transport without the work of a registrar.
//!
//! A server process is pinned to one processor; a client process, pinned to another, has many associations. Each
//! association sends a request as long as a re-registration, and the next one after an answer as long as a registration
//! response, so the rate counts whole operations.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use holdfast_sctp::{
    self, AssocId, MessageToSend, TransportConfig, TransportEndpoint, TransportEvent,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::{Deserialize, Serialize};

use super::role_process::{BenchProcessors, RoleProcess, pin_to_processor, transport_name};

/// Unassigned payload protocol identifier of the requests and answers, which have no format.
const PPID: u32 = 0x4846_0001;
/// Payload protocol identifier of a request for the server's processor time.
const PPID_CPU: u32 = 0x4846_0002;
/// Time limit for the start of the associations.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Parameters of the echo.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub struct EchoLoad {
    /// Associations, each with a local port of its own.
    #[arg(long, default_value_t = 256)]
    pub associations: usize,
    /// Unanswered requests per association.
    #[arg(long, default_value_t = 1)]
    pub window: usize,
    /// Bytes of a request: a re-registration with two addresses and a policy.
    #[arg(long, default_value_t = 104)]
    pub request_len: usize,
    /// Bytes of an answer: a registration response.
    #[arg(long, default_value_t = 32)]
    pub response_len: usize,
    /// Duration of the measurement, milliseconds.
    #[arg(long, default_value_t = 3000)]
    pub milliseconds: u64,
    /// SCTP inside UDP.
    #[arg(long)]
    pub udp: bool,
}

/// Result of the echo.
#[derive(Clone, Debug, Serialize)]
pub struct EchoRow {
    /// `kernel` or `usrsctp`.
    pub transport: &'static str,
    /// Parameters of the echo.
    #[serde(flatten)]
    pub load: EchoLoad,
    /// Requests answered per second.
    pub operations_per_s: f64,
    /// Processor time of the server per request, nanoseconds.
    pub server_cpu_ns: f64,
    /// Share of its processor that the server used.
    pub server_cpu_share: f64,
}

/// Role of a process, as flags of a hidden command.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum EchoRole {
    /// Answer requests until standard input ends.
    #[command(name = "serve")]
    Server {
        /// Bytes of an answer.
        response_len: usize,
        /// The processor to run on.
        processor: usize,
        /// SCTP inside UDP.
        #[arg(long)]
        udp: bool,
    },
    /// Send requests.
    #[command(name = "ask")]
    Client {
        /// The server.
        server: SocketAddr,
        /// UDP port of the server, 0 for none.
        encapsulation: u16,
        /// The processor to run on.
        processor: usize,
        /// Requests to send.
        #[command(flatten)]
        load: EchoLoad,
    },
}

/// Final report of a client.
#[derive(Serialize, Deserialize)]
struct EchoClientReport {
    operations: u64,
    seconds: f64,
    server_cpu_ns: u64,
}

/// Measures `load` between two processes started by `part` (this program, in a hidden role).
///
/// # Errors
/// Associations cannot be established.
pub fn measure(load: &EchoLoad, part: impl Fn() -> Result<Command>) -> Result<EchoRow> {
    let processors = BenchProcessors::allowed()?;
    let mut serve = part()?;
    serve.args(["serve", &load.response_len.to_string()]);
    serve.arg(processors.measured.to_string());
    let udp = load.udp.then_some("--udp");
    serve.args(udp);
    let mut server = RoleProcess::start(serve)?;
    let line = server.read_line()?;
    let (address, encapsulation) = line
        .trim()
        .split_once(' ')
        .context("the echo server printed no address")?;
    let mut ask = part()?;
    ask.args(["ask", address, encapsulation]);
    ask.arg(processors.others.to_string()).args(udp);
    for (flag, value) in [
        ("--associations", load.associations),
        ("--window", load.window),
        ("--request-len", load.request_len),
        ("--response-len", load.response_len),
    ] {
        ask.args([flag, &value.to_string()]);
    }
    ask.args(["--milliseconds", &load.milliseconds.to_string()]);
    let mut client = RoleProcess::start(ask)?;
    let asked: EchoClientReport = serde_json::from_str(&client.read_line()?)?;
    let operations = asked.operations as f64;
    Ok(EchoRow {
        transport: transport_name(),
        load: load.clone(),
        operations_per_s: operations / asked.seconds,
        server_cpu_ns: asked.server_cpu_ns as f64 / operations,
        server_cpu_share: asked.server_cpu_ns as f64 / 1e9 / asked.seconds,
    })
}

/// Runs the server or the client of the echo, as a hidden role.
///
/// # Errors
/// The transport fails.
pub fn run_role(part: &EchoRole) -> Result<()> {
    match part {
        EchoRole::Server {
            response_len,
            processor,
            udp,
        } => run_server(*response_len, *processor, *udp),
        EchoRole::Client {
            server,
            encapsulation,
            processor,
            load,
        } => run_client(
            *server,
            Some(*encapsulation).filter(|&port| port > 0),
            *processor,
            load,
        ),
    }
}

/// Opens an endpoint on loopback, on a port that the system chooses.
fn open_endpoint(listen: bool, udp: bool) -> Result<Box<dyn TransportEndpoint>> {
    let config = TransportConfig {
        listen,
        raw: !udp,
        encapsulation: udp.then_some(0),
        outbound_streams: 1,
        ..TransportConfig::new(vec!["127.0.0.1:0".parse()?])
    };
    holdfast_sctp::open(&config).context("open an SCTP endpoint")
}

/// Answers each request; a request with another identifier is answered with the processor time used so far.
fn run_server(response_len: usize, processor: usize, udp: bool) -> Result<()> {
    pin_to_processor(processor)?;
    let mut endpoint = open_endpoint(true, udp)?;
    let address = endpoint.local_addresses()?[0];
    println!("{address} {}", endpoint.encapsulation_port().unwrap_or(0));
    let answer = MessageToSend::new(PPID, Bytes::from(vec![0x5a; response_len]));
    let mut events = Vec::new();
    // The loop ends with the process that started this one.
    while wait_for_work(endpoint.as_ref())? {
        endpoint.recv_batch(&mut events)?;
        for event in events.drain(..) {
            let TransportEvent::Message { assoc, message } = event else {
                continue;
            };
            if message.ppid == PPID {
                endpoint.send(assoc, &answer)?;
            } else {
                let time = Bytes::copy_from_slice(&own_cpu_ns()?.to_be_bytes());
                endpoint.send(assoc, &MessageToSend::new(message.ppid, time))?;
            }
        }
        endpoint.flush()?;
    }
    Ok(())
}

fn run_client(
    server: SocketAddr,
    encapsulation: Option<u16>,
    processor: usize,
    load: &EchoLoad,
) -> Result<()> {
    pin_to_processor(processor)?;
    let mut client = EchoClient::connect(server, encapsulation, load)?;
    let cpu_before = client.server_cpu_ns()?;
    let start = Instant::now();
    let operations = client.run_load(load, start + Duration::from_millis(load.milliseconds))?;
    let seconds = start.elapsed().as_secs_f64();
    let asked = EchoClientReport {
        operations,
        seconds,
        server_cpu_ns: client.server_cpu_ns()? - cpu_before,
    };
    println!("{}", serde_json::to_string(&asked)?);
    Ok(())
}

struct EchoClient {
    endpoint: Box<dyn TransportEndpoint>,
    associations: Vec<AssocId>,
    events: Vec<TransportEvent>,
}

impl EchoClient {
    fn connect(server: SocketAddr, encapsulation: Option<u16>, load: &EchoLoad) -> Result<Self> {
        let mut client = Self {
            endpoint: open_endpoint(false, load.udp)?,
            associations: Vec::new(),
            events: Vec::new(),
        };
        let deadline = Instant::now() + START_TIMEOUT;
        let (mut requested, mut established) = (0, 0);
        while established < load.associations {
            ensure!(
                Instant::now() < deadline,
                "exceeded time: not all associations are established"
            );
            // Opens a few associations at a time, because a lost packet is only repeated after a timeout.
            while requested < load.associations && requested < established + 64 {
                let assoc = client
                    .endpoint
                    .connect_from_new_port(&[server], encapsulation)?;
                client.associations.push(assoc);
                requested += 1;
            }
            for event in client.wait_for_events()? {
                match event {
                    TransportEvent::Up { .. } => established += 1,
                    TransportEvent::Down { reason, .. } => {
                        bail!("cannot establish an association: {reason:?}")
                    }
                    _ => {}
                }
            }
        }
        Ok(client)
    }

    /// Sends queued messages, waits, and returns the received events.
    fn wait_for_events(&mut self) -> Result<Vec<TransportEvent>> {
        self.endpoint.flush()?;
        wait_for_work(self.endpoint.as_ref())?;
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        self.endpoint.recv_batch(&mut events)?;
        Ok(events)
    }

    fn server_cpu_ns(&mut self) -> Result<u64> {
        let question = MessageToSend::new(PPID_CPU, Bytes::from_static(b"?"));
        self.endpoint.send(self.associations[0], &question)?;
        loop {
            for event in self.wait_for_events()? {
                if let TransportEvent::Message { message, .. } = event
                    && message.ppid == PPID_CPU
                {
                    return Ok(u64::from_be_bytes(message.data.as_ref().try_into()?));
                }
            }
        }
    }

    /// Sends requests until `deadline`, then waits for the outstanding answers; returns the number of answers.
    fn run_load(&mut self, load: &EchoLoad, deadline: Instant) -> Result<u64> {
        let request = MessageToSend::new(PPID, Bytes::from(vec![0xa5; load.request_len]));
        for _ in 0..load.window {
            for &assoc in &self.associations {
                self.endpoint.send(assoc, &request)?;
            }
        }
        let mut unanswered = load.window * self.associations.len();
        let mut operations = 0;
        while unanswered > 0 {
            let is_running = Instant::now() < deadline;
            let events = self.wait_for_events()?;
            for event in &events {
                let TransportEvent::Message { assoc, message } = event else {
                    bail!("an association failed: {event:?}");
                };
                ensure!(
                    message.data.len() == load.response_len,
                    "an answer has the wrong length"
                );
                operations += 1;
                if is_running {
                    self.endpoint.send(*assoc, &request)?;
                } else {
                    unanswered -= 1;
                }
            }
            self.events = events;
        }
        Ok(operations)
    }
}

/// Waits for work; returns false if the process that started this one has ended.
fn wait_for_work(endpoint: &dyn TransportEndpoint) -> Result<bool> {
    let stdin = std::io::stdin();
    let mut waited = [
        PollFd::new(endpoint.fd(), PollFlags::POLLIN),
        PollFd::new(stdin.as_fd(), PollFlags::empty()),
    ];
    poll(&mut waited, PollTimeout::NONE)?;
    Ok(waited[1].any() != Some(true))
}

fn own_cpu_ns() -> Result<u64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = usage.user_time() + usage.system_time();
    Ok(u64::try_from(time.num_microseconds())? * 1000)
}
