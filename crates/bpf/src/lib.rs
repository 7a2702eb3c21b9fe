//! eBPF programs of the data plane, the structures that they share with user space, and their loader.
//!
//! `c/steer.h` (XDP) sends packets to owners, `c/ingress.h` and `c/egress.h` (tcx) enforce ownership, `c/sockets.h`
//! (socket operations) makes and ends the entries of flows; `c/socket_snapshots.bpf.c` reads sockets ([`socket_snapshots`]),
//! `c/descriptors.bpf.c` descriptors ([`descriptors`]), `c/rto_max.bpf.c` sets an option of sockets ([`rto_max`]),
//! `c/reuseport.bpf.c` delivers datagrams of clients to the right socket of a shared port ([`reuseport`]),
//! `c/replicate.bpf.c` sends clients' packets to several servers ([`replication`]). The crate makes no decisions: [`Dataplane`] gives the daemon access to the maps. Maps and links are pinned, so that
//! traffic continues without the daemon.

mod accept_queue_insertion;
mod batch_setter;
mod bpf_iterator;
mod congestion_restore;
pub mod descriptors;
mod flow_groups;
mod flow_quota;
mod hold_counters;
mod iterator_records;
mod kernel_map;
pub mod keyrings;
pub mod landlock;
mod lease;
mod link;
mod map_carry_over;
mod mapped_array;
pub mod replication;
pub mod reuseport;
pub mod rto_max;
mod settings_backup;
pub mod shared_with_c;
pub mod socket_snapshots;
mod steering_table;
pub mod traffic;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use batch_setter::BatchSetter;
use congestion_restore::CongestionRestorer;
use libbpf_rs::{
    MapCore, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject, ProgramInput, RingBuffer,
    RingBufferBuilder,
};
use zerocopy::{FromBytes, IntoBytes};

pub use accept_queue_insertion::AcceptQueue;
pub use flow_groups::ProcessFlowGroups;
pub use flow_quota::{FlowQuota, guaranteed_flows};
pub use hold_counters::HoldCounters;
pub use kernel_map::KernelMap;
pub use lease::{LEASE_WITHOUT_END, Lease, LeaseWriter};
pub use link::Hook;
use map_carry_over::{CarryOver, MapPlan};
pub use map_carry_over::{MapChange, MapLayout};
pub use settings_backup::SettingsBackup;
use shared_with_c::{
    COUNTER_NAMES, Config, Congestion, Event, FlowKey, FlowValue, Node, PLACEMENT_SLOTS, Service,
    ServiceKey, Successor, Translation,
};
pub use steering_table::SteeringTable;

/// Reader of the programs' events.
pub struct EventReader<'a> {
    ring: RingBuffer<'a>,
}

impl EventReader<'_> {
    /// Handles all waiting events.
    ///
    /// The kernel wakes a reader only for an event published after all earlier ones were read. The kernel checks the
    /// reader's position after publishing an event; libbpf checks for events and then publishes its position, without a
    /// barrier in between. Each may miss the other's latest write, and the reader would not be woken again. Hence the
    /// barrier, and the second check after it.
    pub fn consume(&self) {
        // Only a callback that ends early causes an error, and ours does not.
        let _ = self.ring.consume();
        fence(Ordering::SeqCst);
        let _ = self.ring.consume();
    }
}

impl AsFd for EventReader<'_> {
    /// The descriptor is readable when events wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the ring, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) }
    }
}

/// Error between this crate and the kernel.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused the programs.
    #[error(
        "the kernel refused the eBPF programs: {0}. Linux 6.12 or newer with BTF, and root, are needed"
    )]
    Load(String),
    /// A map or link could not be pinned.
    #[error("cannot pin {path}: {source}. Is bpffs mounted there (mount -t bpf bpf /sys/fs/bpf)?")]
    Pin {
        /// Path of the pin.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// A program could not be attached.
    #[error("cannot attach {what}: {source}")]
    Attach {
        /// Name of the hook.
        what: String,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// A pinned map has more entries than the configured capacity.
    #[error(
        "{path} has {entries} entries in use, more than node.capacity = {capacity}; raise node.capacity, or hand flows \
         off before"
    )]
    TooManyEntries {
        /// Path of the pin.
        path: PathBuf,
        /// Number of entries in use.
        entries: usize,
        /// Number of entries of the new map.
        capacity: u32,
    },
    /// The entries of a pinned map cannot be carried over.
    #[error(
        "{path} has keys of another layout, of a release that does not fit this one; start that release, or give up all \
         connections of this node with `holdfast node clean`"
    )]
    OtherLayout {
        /// Path of the pin.
        path: PathBuf,
    },
    /// A map refused an access.
    #[error("map {name}: {reason}")]
    Map {
        /// Name of the map.
        name: &'static str,
        /// Cause of the failure.
        reason: String,
    },
}

/// Verdicts of an XDP program (`linux/bpf.h`).
const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;
/// Longest header that the steering program puts before a packet: an IPv6 header.
const ENCAPSULATION_MAX: usize = 40;

/// Decision of the steering program about a frame.
#[derive(Debug)]
pub enum SteeringVerdict {
    /// This host's stack gets the packet.
    ToStack,
    /// Another node gets the packet.
    Forwarded {
        /// The frame to send, with the link header for that node.
        frame: Vec<u8>,
        /// Index of the interface to that node.
        interface: u32,
    },
    /// Nobody gets the packet.
    Dropped,
}

/// The loaded programs and their maps.
pub struct Dataplane {
    object: Object,
    congestion_restorer: Option<CongestionRestorer>,
    pins: PathBuf,
    carry_over: CarryOver,
    links: Vec<OwnedFd>,
    flow_setter: BatchSetter,
    /// Flows of this node.
    pub flows: KernelMap<FlowKey, FlowValue>,
    /// Nodes of private flows' peers that are not at their address, because they moved.
    pub translations: KernelMap<FlowKey, Translation>,
    /// The steering table; empty except at the holder.
    pub steering: SteeringTable,
    /// Services by address and port.
    pub services: KernelMap<ServiceKey, Service>,
    /// Nodes to which servers of services have moved from this node.
    pub successors: KernelMap<ServiceKey, Successor>,
    /// Nodes by ID.
    pub nodes: KernelMap<u32, Node>,
    /// Addresses from which encapsulated packets are accepted.
    pub peers: KernelMap<[u8; 16], u16>,
    /// Congestion state for sockets about to be restored; `None` if the kernel has no struct_ops.
    pub congestion: Option<KernelMap<FlowKey, Congestion>>,
    /// Counters of held packets.
    pub hold_counters: HoldCounters,
    /// State of the flow groups, one group for each moving process.
    pub flow_groups: ProcessFlowGroups,
    /// Division of the flow table among services.
    pub flow_quota: FlowQuota,
    /// Lease of the contact node.
    pub lease: Lease,
    /// Interface to each node by the node's link address, as last read.
    interfaces: BTreeMap<[u8; 6], u32>,
}

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/holdfast.bpf.o"));

/// Pinned maps. Their names stay, because a restarted daemon finds the pins by them.
const PINNED_MAPS: [&str; 17] = [
    "config",
    "lease",
    "services",
    "successors",
    "placement",
    "nodes",
    "peers",
    "steering",
    "destinations",
    "seed",
    "flows",
    "convoys",
    "translations",
    "holds",
    "counters",
    "waiting",
    "room",
];

impl Dataplane {
    /// Loads the programs; maps that an earlier daemon pinned below `pins` are adopted with their contents. The entries of
    /// maps of another size or layout are copied; [`Dataplane::attach_interface`] pins the new maps, and
    /// [`Dataplane::finish_carry_over`] ends the change.
    ///
    /// # Errors
    /// The kernel refuses the programs, `pins` cannot be used, or the entries of a pinned map do not fit; nothing was
    /// changed in these cases, except that maps may be pinned that were not.
    pub fn load(pins: &Path, flows_max: u32) -> Result<Self, Error> {
        std::fs::create_dir_all(pins).map_err(|source| Error::Pin {
            path: pins.to_owned(),
            source,
        })?;
        let mut opened = open_object(OBJECT, flows_max)?;
        let mut plan = MapPlan::survey(&opened, pins);
        if !plan.errors.is_empty() {
            return Err(plan.errors.swap_remove(0));
        }
        set_pin_paths(&mut opened, pins, |name| plan.is_adopted(name))?;
        let object = opened.load().map_err(load_error)?;
        let carry_over = plan.fill(&object)?;
        let table = |name| map_handle(&object, name);
        let hold_counters = HoldCounters::map(&table("holds")?)?;
        let change_buffer = batch_setter::map_change_buffer(&table("changes")?)?;
        let setter =
            |program_name, name| BatchSetter::new(&object, &change_buffer, program_name, name);
        let restorer = congestion_restore::load().ok();
        let congestion = match &restorer {
            Some(restorer) => Some(KernelMap::new(
                map_handle(&restorer.object, "congestion")?,
                "congestion",
            )),
            None => None,
        };
        Ok(Self {
            flows: KernelMap::new(table("flows")?, "flows"),
            flow_setter: setter("change_flows", "flows")?,
            translations: KernelMap::new(table("translations")?, "translations"),
            steering: SteeringTable::new(
                KernelMap::new(table("steering")?, "steering"),
                setter("change_records", "steering")?,
                &table("destinations")?,
                &KernelMap::new(table("seed")?, "seed"),
            )?,
            services: KernelMap::new(table("services")?, "services"),
            successors: KernelMap::new(table("successors")?, "successors"),
            nodes: KernelMap::new(table("nodes")?, "nodes"),
            peers: KernelMap::new(table("peers")?, "peers"),
            hold_counters,
            flow_groups: ProcessFlowGroups::map(&table("convoys")?)?,
            flow_quota: FlowQuota::map(&table("room")?)?,
            lease: Lease::map(&table("lease")?)?,
            congestion,
            congestion_restorer: restorer,
            object,
            pins: pins.to_owned(),
            carry_over,
            links: Vec::new(),
            interfaces: BTreeMap::new(),
        })
    }

    /// Returns the maps pinned below `pins` that [`Dataplane::load`] would replace, and all reasons for which it would
    /// refuse the pinned maps. Changes nothing.
    ///
    /// # Errors
    /// The programs are damaged.
    pub fn survey_pins(pins: &Path, flows_max: u32) -> Result<(Vec<MapChange>, Vec<Error>), Error> {
        let plan = MapPlan::survey(&open_object(OBJECT, flows_max)?, pins);
        Ok((plan.changes(), plan.errors))
    }

    /// Attaches the filters (and with `steer` the steering program) to an interface; pinned links are adopted.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn attach_interface(&mut self, ifindex: u32, steer: bool) -> Result<(), Error> {
        self.carry_over.pin(&self.pins)?;
        let mut hooks = vec![
            ("holdfast_ingress", Hook::Ingress(ifindex)),
            ("holdfast_egress", Hook::Egress(ifindex)),
        ];
        if steer {
            hooks.push(("holdfast_steer", Hook::Xdp(ifindex)));
        }
        for (program, hook) in hooks {
            let pin = self.pins.join(format!("link-{program}-{ifindex}"));
            let link = link::attach(self::program(&self.object, program)?, hook, &pin)?;
            self.links.push(link);
        }
        Ok(())
    }

    /// Attaches the socket-operations program to the cgroup of the server programs.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn attach_cgroup(&mut self, cgroup: &Path) -> Result<(), Error> {
        self.carry_over.pin(&self.pins)?;
        let pin = self.pins.join("link-holdfast_sockets");
        let link = link::attach_cgroup(program(&self.object, "holdfast_sockets")?, cgroup, &pin)?;
        self.links.push(link);
        Ok(())
    }

    /// Ends a change of maps, once all programs are attached: copies the entries that the earlier programs changed after
    /// [`Dataplane::load`]. Returns the number of entries that did not fit.
    pub fn finish_carry_over(&mut self) -> usize {
        self.carry_over.finish()
    }

    /// Returns the `TCP_CONGESTION` name that makes a socket take the state in [`Dataplane::congestion`] for its flow.
    #[must_use]
    pub fn congestion_restorer_name(&self) -> Option<&str> {
        self.congestion_restorer
            .as_ref()
            .map(|restorer| restorer.name.as_str())
    }

    /// Sets the configuration of this node for the programs.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_config(&self, config: &Config) -> Result<(), Error> {
        KernelMap::<u32, Config>::new(map_handle(&self.object, "config")?, "config").set(&0, config)
    }

    /// Returns the configuration of the programs; zeros before the first [`Dataplane::set_config`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn config(&self) -> Result<Config, Error> {
        let map = KernelMap::<u32, Config>::new(map_handle(&self.object, "config")?, "config");
        Ok(map.get(&0)?.unwrap_or_default())
    }

    /// Fills one half of a service's placement table with the node ID of each slot.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_placement(
        &self,
        index: u16,
        generation: u8,
        slots: &[u16; PLACEMENT_SLOTS],
    ) -> Result<(), Error> {
        let map = map_handle(&self.object, "placement")?;
        let first = (u32::from(index) * 2 + u32::from(generation & 1)) * PLACEMENT_SLOTS as u32;
        let keys: Vec<u32> = (first..first + PLACEMENT_SLOTS as u32).collect();
        KernelMap::<u32, u16>::new(map, "placement").set_many(&keys, slots)
    }

    /// Sets many of this node's flows with few system calls.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses; some flows may have been set.
    pub fn set_flows(&self, keys: &[FlowKey], values: &[FlowValue]) -> Result<(), Error> {
        self.flow_setter.set(keys, values)
    }

    /// Runs the steering program on a frame with its link header, as if the frame had arrived.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn steer(&mut self, frame: &[u8]) -> Result<SteeringVerdict, Error> {
        let run_error =
            |e: libbpf_rs::Error| Error::Load(format!("cannot run the steering program: {e:#}"));
        let mut forwarded = vec![0; frame.len() + ENCAPSULATION_MAX];
        let input = ProgramInput {
            data_in: Some(frame),
            data_out: Some(&mut forwarded),
            ..ProgramInput::default()
        };
        let output = self
            .object
            .progs_mut()
            .find(|program| program.name() == "holdfast_steer")
            .ok_or_else(|| Error::Load("program holdfast_steer is missing".into()))?
            .test_run(input)
            .map_err(run_error)?;
        let length = output.data.map_or(0, |data| data.len());
        match output.return_value {
            XDP_PASS => return Ok(SteeringVerdict::ToStack),
            XDP_REDIRECT => forwarded.truncate(length),
            _ => return Ok(SteeringVerdict::Dropped),
        }
        Ok(match self.interface_to(&forwarded) {
            Some(interface) => SteeringVerdict::Forwarded {
                frame: forwarded,
                interface,
            },
            None => SteeringVerdict::Dropped,
        })
    }

    /// Returns the index of the interface to the node with a frame's destination address. The table of nodes is long, and so is
    /// read only for an address that is not known yet.
    fn interface_to(&mut self, frame: &[u8]) -> Option<u32> {
        let link: [u8; 6] = frame.first_chunk().copied()?;
        if !self.interfaces.contains_key(&link) {
            let nodes = self.nodes.entries().into_iter();
            self.interfaces = nodes.map(|(_, node)| (node.link, node.ifindex)).collect();
        }
        self.interfaces.get(&link).copied()
    }

    /// Returns every counter's name and its sum over all processors.
    #[must_use]
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let Ok(map) = map_handle(&self.object, "counters") else {
            return Vec::new();
        };
        let sum = |index: u32| -> u64 {
            let found = map
                .lookup_percpu(index.as_bytes(), MapFlags::ANY)
                .ok()
                .flatten()
                .unwrap_or_default();
            found
                .iter()
                .filter_map(|bytes| u64::read_from_bytes(bytes).ok())
                .sum()
        };
        (0u32..)
            .zip(COUNTER_NAMES)
            .map(|(index, name)| (name, sum(index)))
            .collect()
    }

    /// Makes a reader of the programs' events; [`EventReader::consume`] calls `handle_event` for each.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn events<'a>(
        &self,
        mut handle_event: impl FnMut(Event) + 'a,
    ) -> Result<EventReader<'a>, Error> {
        let map = map_handle(&self.object, "events")?;
        let mut builder = RingBufferBuilder::new();
        let map_error = |e: libbpf_rs::Error| Error::Map {
            name: "events",
            reason: e.to_string(),
        };
        builder
            .add(&map, move |bytes| {
                if let Ok((event, _)) = Event::read_from_prefix(bytes) {
                    handle_event(event);
                }
                0
            })
            .map_err(map_error)?;
        Ok(EventReader {
            ring: builder.build().map_err(map_error)?,
        })
    }

    /// Detaches all programs and removes the pins: the node gives up all its flows.
    pub fn detach(self) {
        drop(self.links);
        let _ = std::fs::remove_dir_all(&self.pins);
    }

    /// Attaches the program that puts connections into the queues of listeners to a TUN.
    ///
    /// # Errors
    /// As [`AcceptQueue::attach`].
    pub fn attach_accept_queue(&self, ifindex: u32) -> Result<AcceptQueue, Error> {
        AcceptQueue::attach(&self.pins, ifindex)
    }
}

fn program<'a>(object: &'a Object, name: &str) -> Result<BorrowedFd<'a>, Error> {
    let mut programs = object.progs();
    programs
        .find(|program| program.name() == name)
        // SAFETY: the descriptor belongs to `object`, which outlives the borrow.
        .map(|program| unsafe {
            BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&program.as_fd()))
        })
        .ok_or_else(|| Error::Load(format!("program {name} is missing")))
}

/// Loads an object whose pinned maps are adopted.
fn load_object(bytes: &[u8], pins: &Path, flows_max: u32) -> Result<Object, Error> {
    let mut object = open_object(bytes, flows_max)?;
    set_pin_paths(&mut object, pins, |_| true)?;
    object.load().map_err(load_error)
}

fn open_object(bytes: &[u8], flows_max: u32) -> Result<OpenObject, Error> {
    let mut object = ObjectBuilder::default()
        .open_memory(bytes)
        .map_err(load_error)?;
    for mut map in object.maps_mut() {
        if map.name() == "flows" || map.name() == "steering" {
            map.set_max_entries(flows_max).map_err(load_error)?;
        }
    }
    Ok(object)
}

/// Makes loading adopt or pin the maps for which `is_adopted` returns true.
fn set_pin_paths(
    object: &mut OpenObject,
    pins: &Path,
    is_adopted: impl Fn(&str) -> bool,
) -> Result<(), Error> {
    for mut map in object.maps_mut() {
        let name = map.name().to_string_lossy().into_owned();
        if PINNED_MAPS.contains(&name.as_str()) && is_adopted(&name) {
            map.set_pin_path(pins.join(&name)).map_err(load_error)?;
        }
    }
    Ok(())
}

fn load_error(error: libbpf_rs::Error) -> Error {
    Error::Load(format!("{error:#}"))
}

fn map_handle(object: &Object, name: &'static str) -> Result<MapHandle, Error> {
    let map = object.maps().find(|map| map.name() == name);
    let missing = || Error::Load(format!("map {name} is missing"));
    MapHandle::try_from(&map.ok_or_else(missing)?).map_err(|e| Error::Map {
        name,
        reason: e.to_string(),
    })
}
