//! The link program: carries frames between packet sockets and [`EmulatedLink`]s. One process with one thread serves all links
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

use super::{EmulatedLink, LinkConfig, LinkCounters};
use crate::{
    address_plan::MacAddress,
    error::{Error, ErrorContext, Result},
    host_init::{join_cgroup, read_task, report_ready},
    lab_state::write_atomically,
    topology::DuplexLinkConfig,
};

/// Maximum size of a received frame, in bytes: the interfaces neither merge packets nor defer segmentation, so real
/// frames are smaller.
const FRAME_MAX: usize = 65_536;
/// Number of frames taken from one socket before the others are served.
const FRAMES_PER_TURN: usize = 64;
/// Socket buffer size, in bytes, for bursts while the program waits for a processor.
const SOCKET_BUFFER_BYTES: usize = 32 << 20;
/// Minimum interval between writes of the counters.
const COUNTERS_INTERVAL: Duration = Duration::from_millis(100);

const TIMER_TOKEN: u64 = u64::MAX;
const OWNER_TOKEN: u64 = u64::MAX - 1;

/// Parameters of the link program.
#[derive(Serialize, Deserialize)]
pub(crate) struct LinkTask {
    pub splices: Vec<SplicedLink>,
    pub cgroup: PathBuf,
    /// The file for the counters.
    pub counters_path: PathBuf,
    /// Keep running after the owner has ended.
    pub keep: bool,
}

/// One host's link: frames received at `near` travel up and leave at `wire`, and frames received at `wire` travel down.
#[derive(Serialize, Deserialize)]
pub(crate) struct SplicedLink {
    pub host: String,
    /// The interface that leads to the host.
    pub host_side: String,
    /// The interface that leads to the switch.
    pub switch_side: String,
    pub duplex: DuplexLinkConfig,
}

/// One direction of a host's link.
struct LinkDirection {
    host: String,
    is_up: bool,
    from: OwnedFd,
    to: OwnedFd,
    link: EmulatedLink<Vec<u8>>,
    /// Links to hosts at another distance, by their link addresses.
    links_toward: BTreeMap<MacAddress, EmulatedLink<Vec<u8>>>,
    /// Number of frames that the kernel did not accept.
    refused: u64,
}

impl LinkDirection {
    /// Returns the link for this frame, which starts with its destination address.
    fn link_for(&mut self, frame: &[u8]) -> &mut EmulatedLink<Vec<u8>> {
        let to = frame.first_chunk().map(|to| MacAddress(*to));
        to.and_then(|to| self.links_toward.get_mut(&to))
            .unwrap_or(&mut self.link)
    }

    fn links(&self) -> impl Iterator<Item = &EmulatedLink<Vec<u8>>> {
        std::iter::once(&self.link).chain(self.links_toward.values())
    }

    /// Returns the next frame that has arrived by `now`.
    fn poll_packet(&mut self, now: Duration) -> Option<Vec<u8>> {
        let mut links = std::iter::once(&mut self.link).chain(self.links_toward.values_mut());
        links.find_map(|link| link.poll_packet(now))
    }
}

/// Counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionCounters {
    /// The link's counters.
    #[serde(flatten)]
    pub link: LinkCounters,
    /// Number of frames that left the link and that the kernel did not accept.
    pub refused: u64,
}

/// Counters of one host's link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DuplexCounters {
    /// From the host to the switch.
    pub up: DirectionCounters,
    /// From the switch to the host.
    pub down: DirectionCounters,
}

/// Runs the role `lab-link`.
pub(crate) fn run() -> Result<i32> {
    let task: LinkTask = read_task()?;
    join_cgroup(&task.cgroup)?;
    let mut program = LinkProgram::new(task)?;
    program.write_counters()?;
    report_ready()?;
    while program.handle_events()? {}
    Ok(0)
}

struct LinkProgram {
    paths: Vec<LinkDirection>,
    epoll: Epoll,
    timer: TimerFd,
    buffer: Vec<u8>,
    counters_path: PathBuf,
    /// Time of the next write of the counters, if they have changed.
    counters_due: Option<Duration>,
}

impl LinkProgram {
    fn new(task: LinkTask) -> Result<LinkProgram> {
        let describe = || "set up the link program".to_owned();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context(describe)?;
        let timer = TimerFd::new(
            TimerClock::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        );
        let timer = timer.context(describe)?;
        epoll
            .add(&timer, EpollEvent::new(EpollFlags::EPOLLIN, TIMER_TOKEN))
            .context(describe)?;
        if !task.keep {
            epoll
                .add(
                    std::io::stdin().as_fd(),
                    EpollEvent::new(EpollFlags::EPOLLIN, OWNER_TOKEN),
                )
                .context(describe)?;
        }
        let mut paths = Vec::new();
        for splice in task.splices {
            paths.extend(open_directions(splice)?);
        }
        for (index, path) in paths.iter().enumerate() {
            epoll
                .add(
                    &path.from,
                    EpollEvent::new(EpollFlags::EPOLLIN, index as u64),
                )
                .context(describe)?;
        }
        Ok(LinkProgram {
            paths,
            epoll,
            timer,
            buffer: vec![0; FRAME_MAX],
            counters_path: task.counters_path,
            counters_due: None,
        })
    }

    /// Waits for events and handles them; returns false when the owner has ended.
    fn handle_events(&mut self) -> Result<bool> {
        let mut events = [EpollEvent::empty(); 64];
        let count = match self.epoll.wait(&mut events, EpollTimeout::NONE) {
            Err(Errno::EINTR) => 0,
            count => count.context(|| "wait for frames".into())?,
        };
        for event in &events[..count] {
            match event.data() {
                OWNER_TOKEN => return Ok(false),
                // Reading clears the timer; the value is irrelevant.
                TIMER_TOKEN => drop(self.timer.wait()),
                index => self.receive_frames(index as usize)?,
            }
        }
        self.send_frames()?;
        self.set_timer()?;
        Ok(true)
    }

    /// Receives the waiting frames at the start of a path.
    fn receive_frames(&mut self, index: usize) -> Result<()> {
        let path = &mut self.paths[index];
        for _ in 0..FRAMES_PER_TURN {
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
                let now = monotonic_now()?;
                let frame = &self.buffer[..bytes];
                path.link_for(frame).handle_packet(now, frame.to_vec());
                self.counters_due.get_or_insert(now + COUNTERS_INTERVAL);
            }
        }
        Ok(())
    }

    /// Sends the frames that have arrived at the end of each path.
    fn send_frames(&mut self) -> Result<()> {
        for path in &mut self.paths {
            while let Some(frame) = path.poll_packet(monotonic_now()?) {
                if send(path.to.as_raw_fd(), &frame, MsgFlags::MSG_DONTWAIT).is_err() {
                    path.refused += 1;
                }
                self.counters_due
                    .get_or_insert(monotonic_now()? + COUNTERS_INTERVAL);
            }
        }
        if self
            .counters_due
            .is_some_and(|at| monotonic_now().is_ok_and(|now| now >= at))
        {
            self.write_counters()?;
            self.counters_due = None;
        }
        Ok(())
    }

    fn set_timer(&self) -> Result<()> {
        let links = self.paths.iter().flat_map(LinkDirection::links);
        let arrivals = links.filter_map(EmulatedLink::poll_timeout);
        let Some(next) = arrivals.chain(self.counters_due).min() else {
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
        let mut counters: BTreeMap<&str, DuplexCounters> = BTreeMap::new();
        for path in &self.paths {
            let duplex = counters.entry(&path.host).or_default();
            let side = if path.is_up {
                &mut duplex.up
            } else {
                &mut duplex.down
            };
            *side = DirectionCounters {
                link: path.links().map(EmulatedLink::counters).sum(),
                refused: path.refused,
            };
        }
        let text = serde_json::to_vec(&counters).map_err(std::io::Error::from);
        write_atomically(
            &self.counters_path,
            &text.context(|| "encode the counters".into())?,
        )
    }
}

fn open_directions(splice: SplicedLink) -> Result<[LinkDirection; 2]> {
    let (near, wire) = (
        open_socket(&splice.host_side)?,
        open_socket(&splice.switch_side)?,
    );
    let duplicate = |socket: &OwnedFd| {
        socket
            .try_clone()
            .context(|| "duplicate a packet socket".into())
    };
    let (near_out, wire_out) = (duplicate(&near)?, duplicate(&wire)?);
    let duplex = splice.duplex;
    let link_toward = |(to, delay): &(MacAddress, Duration)| {
        let seed = u64::from(to.0[5]) << 32 ^ duplex.up.seed;
        let config = LinkConfig {
            delay: *delay,
            seed,
            ..duplex.up.clone()
        };
        (*to, EmulatedLink::new(config))
    };
    let toward = duplex.toward.iter().map(link_toward).collect();
    let path = |up, from, to, config, toward| LinkDirection {
        host: splice.host.clone(),
        is_up: up,
        from,
        to,
        link: EmulatedLink::new(config),
        links_toward: toward,
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
    let address = packet_socket_address(interface)?;
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
    setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BUFFER_BYTES).context(describe)?;
    setsockopt(&socket, sockopt::SndBufForce, &SOCKET_BUFFER_BYTES).context(describe)?;
    Ok(socket)
}

fn packet_socket_address(interface: &str) -> Result<LinkAddr> {
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

fn monotonic_now() -> Result<Duration> {
    ClockId::CLOCK_MONOTONIC
        .now()
        .map(Duration::from)
        .context(|| "read the clock".into())
}
