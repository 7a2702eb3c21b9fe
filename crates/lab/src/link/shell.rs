//! The link program: carries frames between packet sockets and [`Link`]s. One process with one thread serves all links
//! of a lab.

use std::{
    collections::BTreeMap,
    io::IoSliceMut,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};

use nix::{
    errno::Errno,
    ifaddrs::getifaddrs,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        socket::{
            AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, recvmsg,
            send, setsockopt, socket, sockopt,
        },
        time::TimeSpec,
        timerfd::{ClockId as TimerClock, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
    time::ClockId,
};
use serde::{Deserialize, Serialize};

use super::{Counters, Link, LinkConfig};
use crate::{
    error::{Context, Error, Result},
    init::{join_cgroup, read_task, say_ready},
    plan::MacAddress,
    state::write_whole,
    topology::Duplex,
};

/// Maximum size of a received frame, in bytes: the interfaces neither merge packets nor defer segmentation, so real
/// frames are smaller.
const FRAME_MAX: usize = 65_536;
/// Number of frames taken from one socket before the others are served.
const TURN: usize = 64;
/// Socket buffer size, in bytes, for bursts while the program waits for a processor.
const SOCKET_BYTES: usize = 32 << 20;
/// Minimum interval between writes of the counters.
const COUNTERS_EVERY: Duration = Duration::from_millis(100);

const TIMER: u64 = u64::MAX;
const OWNER: u64 = u64::MAX - 1;

/// Parameters of the link program.
#[derive(Serialize, Deserialize)]
pub(crate) struct Task {
    pub splices: Vec<Splice>,
    pub cgroup: PathBuf,
    /// The file for the counters.
    pub counters: PathBuf,
    /// Keep running after the owner has ended.
    pub keep: bool,
}

/// One host's link: frames received at `near` travel up and leave at `wire`, and frames received at `wire` travel down.
#[derive(Serialize, Deserialize)]
pub(crate) struct Splice {
    pub host: String,
    /// The interface that leads to the host.
    pub near: String,
    /// The interface that leads to the switch.
    pub wire: String,
    pub duplex: Duplex,
}

/// One direction of a host's link.
struct Path {
    host: String,
    up: bool,
    from: OwnedFd,
    to: OwnedFd,
    link: Link<Vec<u8>>,
    /// Links to hosts at another distance, by their link addresses.
    toward: BTreeMap<MacAddress, Link<Vec<u8>>>,
    /// Number of frames that the kernel did not accept.
    refused: u64,
}

impl Path {
    /// Returns the link for this frame, which starts with its destination address.
    fn link_of(&mut self, frame: &[u8]) -> &mut Link<Vec<u8>> {
        let to = frame.first_chunk().map(|to| MacAddress(*to));
        to.and_then(|to| self.toward.get_mut(&to))
            .unwrap_or(&mut self.link)
    }

    fn links(&self) -> impl Iterator<Item = &Link<Vec<u8>>> {
        std::iter::once(&self.link).chain(self.toward.values())
    }

    /// Returns the next frame that has arrived by `now`.
    fn poll_packet(&mut self, now: Duration) -> Option<Vec<u8>> {
        let mut links = std::iter::once(&mut self.link).chain(self.toward.values_mut());
        links.find_map(|link| link.poll_packet(now))
    }
}

/// Counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCounters {
    /// The link's counters.
    #[serde(flatten)]
    pub link: Counters,
    /// Number of frames that left the link and that the kernel did not accept.
    pub refused: u64,
}

/// Counters of one host's link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DuplexCounters {
    /// From the host to the switch.
    pub up: PathCounters,
    /// From the switch to the host.
    pub down: PathCounters,
}

/// Runs the role `lab-link`.
pub(crate) fn run() -> Result<i32> {
    let task: Task = read_task()?;
    join_cgroup(&task.cgroup)?;
    let mut program = Program::new(task)?;
    program.write_counters()?;
    say_ready()?;
    while program.turn()? {}
    Ok(0)
}

struct Program {
    paths: Vec<Path>,
    epoll: Epoll,
    timer: TimerFd,
    buffer: Vec<u8>,
    counters: PathBuf,
    /// Time of the next write of the counters, if they have changed.
    write_at: Option<Duration>,
}

impl Program {
    fn new(task: Task) -> Result<Program> {
        let describe = || "set up the link program".to_owned();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context(describe)?;
        let timer = TimerFd::new(
            TimerClock::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        );
        let timer = timer.context(describe)?;
        epoll
            .add(&timer, EpollEvent::new(EpollFlags::EPOLLIN, TIMER))
            .context(describe)?;
        if !task.keep {
            epoll
                .add(
                    std::io::stdin().as_fd(),
                    EpollEvent::new(EpollFlags::EPOLLIN, OWNER),
                )
                .context(describe)?;
        }
        let mut paths = Vec::new();
        for splice in task.splices {
            paths.extend(open_paths(splice)?);
        }
        for (index, path) in paths.iter().enumerate() {
            epoll
                .add(
                    &path.from,
                    EpollEvent::new(EpollFlags::EPOLLIN, index as u64),
                )
                .context(describe)?;
        }
        Ok(Program {
            paths,
            epoll,
            timer,
            buffer: vec![0; FRAME_MAX],
            counters: task.counters,
            write_at: None,
        })
    }

    /// Waits for events and handles them; returns false when the owner has ended.
    fn turn(&mut self) -> Result<bool> {
        let mut events = [EpollEvent::empty(); 64];
        let count = match self.epoll.wait(&mut events, EpollTimeout::NONE) {
            Err(Errno::EINTR) => 0,
            count => count.context(|| "wait for frames".into())?,
        };
        for event in &events[..count] {
            match event.data() {
                OWNER => return Ok(false),
                // Reading clears the timer; the value is irrelevant.
                TIMER => drop(self.timer.wait()),
                index => self.take(index as usize)?,
            }
        }
        self.give()?;
        self.set_timer()?;
        Ok(true)
    }

    /// Receives the waiting frames at the start of a path.
    fn take(&mut self, index: usize) -> Result<()> {
        let path = &mut self.paths[index];
        for _ in 0..TURN {
            let mut pieces = [IoSliceMut::new(&mut self.buffer)];
            let received = recvmsg::<LinkAddr>(
                path.from.as_raw_fd(),
                &mut pieces,
                None,
                MsgFlags::MSG_DONTWAIT,
            );
            let (bytes, outgoing) = match received {
                Ok(message) => (message.bytes, message.address.is_some_and(is_outgoing)),
                Err(Errno::EAGAIN) => return Ok(()),
                // An interface that goes down reports one error; frames arrive again when it is up.
                Err(Errno::ENETDOWN | Errno::EINTR) => continue,
                Err(error) => return Err(error).context(|| format!("receive at {}", path.host)),
            };
            if !outgoing {
                let now = now()?;
                let frame = &self.buffer[..bytes];
                path.link_of(frame).handle_packet(now, frame.to_vec());
                self.write_at.get_or_insert(now + COUNTERS_EVERY);
            }
        }
        Ok(())
    }

    /// Sends the frames that have arrived at the end of each path.
    fn give(&mut self) -> Result<()> {
        for path in &mut self.paths {
            while let Some(frame) = path.poll_packet(now()?) {
                if send(path.to.as_raw_fd(), &frame, MsgFlags::MSG_DONTWAIT).is_err() {
                    path.refused += 1;
                }
                self.write_at.get_or_insert(now()? + COUNTERS_EVERY);
            }
        }
        if self
            .write_at
            .is_some_and(|at| now().is_ok_and(|now| now >= at))
        {
            self.write_counters()?;
            self.write_at = None;
        }
        Ok(())
    }

    fn set_timer(&self) -> Result<()> {
        let links = self.paths.iter().flat_map(Path::links);
        let arrivals = links.filter_map(Link::poll_timeout);
        let Some(next) = arrivals.chain(self.write_at).min() else {
            return Ok(());
        };
        // A value of zero would disarm the timer.
        let at = TimeSpec::from_duration(next.max(Duration::from_nanos(1)));
        let set = self.timer.set(
            Expiration::OneShot(at),
            TimerSetTimeFlags::TFD_TIMER_ABSTIME,
        );
        set.context(|| "set the timer".into())
    }

    fn write_counters(&self) -> Result<()> {
        let mut shown: BTreeMap<&str, DuplexCounters> = BTreeMap::new();
        for path in &self.paths {
            let both = shown.entry(&path.host).or_default();
            let side = if path.up {
                &mut both.up
            } else {
                &mut both.down
            };
            *side = PathCounters {
                link: path.links().map(Link::counters).sum(),
                refused: path.refused,
            };
        }
        let text = serde_json::to_vec(&shown).map_err(std::io::Error::from);
        write_whole(
            &self.counters,
            &text.context(|| "encode the counters".into())?,
        )
    }
}

fn open_paths(splice: Splice) -> Result<[Path; 2]> {
    let (near, wire) = (open_socket(&splice.near)?, open_socket(&splice.wire)?);
    let again = |socket: &OwnedFd| {
        socket
            .try_clone()
            .context(|| "duplicate a packet socket".into())
    };
    let (near_out, wire_out) = (again(&near)?, again(&wire)?);
    let duplex = splice.duplex;
    let apart = |(to, delay): &(MacAddress, Duration)| {
        let seed = u64::from(to.0[5]) << 32 ^ duplex.up.seed;
        let config = LinkConfig {
            delay: *delay,
            seed,
            ..duplex.up.clone()
        };
        (*to, Link::new(config))
    };
    let toward = duplex.toward.iter().map(apart).collect();
    let path = |up, from, to, config, toward| Path {
        host: splice.host.clone(),
        up,
        from,
        to,
        link: Link::new(config),
        toward,
        refused: 0,
    };
    let (up, down) = (duplex.up, duplex.down);
    Ok([
        path(true, near, wire_out, up, toward),
        path(false, wire, near_out, down, BTreeMap::new()),
    ])
}

/// Opens a socket that receives and sends whole frames on one interface.
fn open_socket(interface: &str) -> Result<OwnedFd> {
    let describe = || format!("open a packet socket on {interface}");
    let address = address_of(interface)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(
        AddressFamily::Packet,
        SockType::Raw,
        flags,
        SockProtocol::EthAll,
    )
    .context(describe)?;
    // The address names no protocol; the kernel then keeps the socket's protocol.
    bind(socket.as_raw_fd(), &address).context(describe)?;
    setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BYTES).context(describe)?;
    setsockopt(&socket, sockopt::SndBufForce, &SOCKET_BYTES).context(describe)?;
    Ok(socket)
}

fn address_of(interface: &str) -> Result<LinkAddr> {
    let addresses = getifaddrs().context(|| "list interfaces".into())?;
    let mut named = addresses.filter(|entry| entry.interface_name == interface);
    named
        .find_map(|entry| entry.address?.as_link_addr().copied())
        .ok_or_else(|| Error::Machine(format!("there is no interface {interface}")))
}

/// Returns true for a frame that leaves by its interface, which a packet socket also receives.
fn is_outgoing(address: LinkAddr) -> bool {
    address.pkttype() == nix::libc::PACKET_OUTGOING
}

fn now() -> Result<Duration> {
    ClockId::CLOCK_MONOTONIC
        .now()
        .map(Duration::from)
        .context(|| "read the clock".into())
}
