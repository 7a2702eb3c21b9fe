//! Traffic for `holdfast bench steer`: a generator of packets of many flows, and a sink that counts and checks the
//! packets at each owner.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{Error, KernelMap, link, map_handle};

/// Number of flows with one client address; further flows have the next address.
pub const FLOWS_PER_ADDRESS: u32 = 32768;
/// Most flows of a plan.
pub const MAX_FLOWS: u32 = 1 << 20;
/// Client port of the first flow of an address.
pub const FIRST_PORT: u16 = 1024;

/// Length of a generated frame, link header included, bytes.
const FRAME_BYTES: usize = 60;
const TEST_XDP_LIVE_FRAMES: u32 = 1 << 1;

/// Parameters of the traffic; flow `i` comes from client address `client + i / 32768`, port `1024 + i % 32768`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct TrafficPlan {
    /// Number of flows, which take turns.
    pub flows: u32,
    /// Outgoing interface in the generator's namespace.
    pub ifindex: u32,
    /// Service address.
    pub service: [u8; 4],
    /// First client address.
    pub client: [u8; 4],
    /// Service port, network order.
    pub port: [u8; 2],
    /// Link address of the next hop.
    pub next_hop_link: [u8; 6],
    /// Source link address.
    pub own_link: [u8; 6],
    /// Number of owners; flow `i` belongs to owner `i % owners`.
    pub owners: u16,
    /// Bits that must be zero in a packet's number for the packet to be checked.
    pub sample_mask: u32,
    /// Number of the round, not 0; differs between plans.
    pub round: u32,
}

/// Counts of packets at an owner.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct SinkCounts {
    /// Packets to the service.
    pub packets: u64,
    /// Packets of these that were checked.
    pub checked: u64,
    /// Flows with a checked packet in this round.
    pub flows: u64,
    /// Packets with addresses or ports other than the flow's.
    pub wrong_flow: u64,
    /// Packets of flows that belong to another owner.
    pub wrong_owner: u64,
    /// Packets with a wrong payload or checksum.
    pub wrong_content: u64,
}

const _: () = {
    assert!(size_of::<TrafficPlan>() == 40);
    assert!(size_of::<SinkCounts>() == 48);
};

/// The loaded traffic programs.
pub struct TrafficGenerator {
    object: Object,
    sinks: Vec<OwnedFd>,
}

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/traffic.bpf.o"));

impl TrafficGenerator {
    /// Loads the BPF programs that generate and count packets.
    ///
    /// # Errors
    /// The kernel refuses the programs.
    pub fn load() -> Result<Self, Error> {
        let load_error = |e: libbpf_rs::Error| Error::Load(format!("{e:#}"));
        let open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(load_error)?;
        Ok(Self {
            object: open.load().map_err(load_error)?,
            sinks: Vec::new(),
        })
    }

    /// Counts, checks and drops packets for owner 0 or 1 at an interface of the caller's network namespace: at XDP, or
    /// otherwise at tcx ingress.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn attach_sink(&mut self, ifindex: u32, owner: u8, xdp: bool) -> Result<(), Error> {
        let name = format!(
            "traffic_take_{}{}",
            if xdp { "xdp_" } else { "" },
            owner & 1
        );
        let hook = if xdp {
            link::Hook::Xdp(ifindex)
        } else {
            link::Hook::Ingress(ifindex)
        };
        let program = self.program(&name)?;
        // SAFETY: the descriptor belongs to `self.object`, which is not changed during the call.
        let program = unsafe { BorrowedFd::borrow_raw(program.as_fd().as_raw_fd()) };
        self.sinks.push(link::attach_unpinned(program, hook)?);
        Ok(())
    }

    /// Sets the parameters of sent and expected packets.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_plan(&self, plan: &TrafficPlan) -> Result<(), Error> {
        KernelMap::<u32, TrafficPlan>::new(map_handle(&self.object, "plan")?, "plan")
            .set(&0, plan)?;
        let start = [0u8; 16];
        KernelMap::<u32, [u8; 16]>::new(map_handle(&self.object, "position")?, "position")
            .set(&0, &start)
    }

    /// Sends `packets` packets from the caller's network namespace at full speed.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn send(&mut self, packets: u32) -> Result<(), Error> {
        let send_error =
            |e: libbpf_rs::Error| Error::Load(format!("cannot send live frames: {e:#}"));
        let frame = [0u8; FRAME_BYTES];
        let input = ProgramInput {
            data_in: Some(&frame),
            flags: TEST_XDP_LIVE_FRAMES,
            repeat: packets,
            ..Default::default()
        };
        let program = self
            .object
            .progs_mut()
            .find(|program| program.name() == "traffic_make");
        let missing = || Error::Load("program traffic_make is missing".into());
        program
            .ok_or_else(missing)?
            .test_run(input)
            .map_err(send_error)?;
        Ok(())
    }

    /// Returns a reader of the owners' counts, which works also while packets are sent.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn counts(&self) -> Result<SinkCountReader, Error> {
        Ok(SinkCountReader(map_handle(&self.object, "seen")?))
    }

    fn program(&self, name: &str) -> Result<libbpf_rs::Program<'_>, Error> {
        let found = self.object.progs().find(|program| program.name() == name);
        found.ok_or_else(|| Error::Load(format!("program {name} is missing")))
    }
}

/// Reader of the owners' counts.
pub struct SinkCountReader(MapHandle);

impl SinkCountReader {
    /// Returns the counts of each owner since the programs were loaded.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(&self) -> Result<[SinkCounts; 2], Error> {
        let mut sums = [SinkCounts::default(); 2];
        for (index, sum) in (0u32..).zip(&mut sums) {
            let values = self
                .0
                .lookup_percpu(index.as_bytes(), MapFlags::ANY)
                .map_err(|e| Error::Map {
                    name: "seen",
                    reason: e.to_string(),
                })?;
            for counts in values
                .iter()
                .flatten()
                .filter_map(|bytes| SinkCounts::read_from_bytes(bytes).ok())
            {
                sum.packets += counts.packets;
                sum.checked += counts.checked;
                sum.flows += counts.flows;
                sum.wrong_flow += counts.wrong_flow;
                sum.wrong_owner += counts.wrong_owner;
                sum.wrong_content += counts.wrong_content;
            }
        }
        Ok(sums)
    }
}

/// Returns the client of flow `index` in a plan with the first client address `client`.
#[must_use]
pub fn flow_client(client: Ipv4Addr, index: u32) -> (Ipv4Addr, u16) {
    let address = Ipv4Addr::from(u32::from(client) + index / FLOWS_PER_ADDRESS);
    let port = u16::try_from(index % FLOWS_PER_ADDRESS).unwrap_or(0) + FIRST_PORT;
    (address, port)
}
