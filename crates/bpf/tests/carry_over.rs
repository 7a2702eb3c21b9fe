//! Maps of another size or layout take the place of pinned ones, with their entries. Needs root.

use std::path::{Path, PathBuf};

use holdfast_bpf::shared_with_c::{Config, FlowKey, FlowState, FlowValue, RECORD_OWNED, Record};
use holdfast_bpf::{Dataplane, Error, Lease};
use libbpf_rs::libbpf_sys::bpf_map_create_opts;
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use zerocopy::IntoBytes;

const CAPACITY: u32 = 64;

/// A directory for pins and an empty control group to attach to, removed in the end. None without root.
struct Host {
    pins: PathBuf,
    cgroup: PathBuf,
}

impl Host {
    fn new(name: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: eBPF programs need root");
            return None;
        }
        let name = format!("holdfast-{name}-{}", std::process::id());
        let mounts = std::fs::read_to_string("/proc/mounts").expect("readable");
        let cgroup_root = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let path = fields.next()?;
            (fields.next()? == "cgroup2").then_some(path)
        });
        let cgroup = Path::new(cgroup_root.expect("cgroup2 is mounted")).join(&name);
        std::fs::create_dir(&cgroup).expect("a control group");
        Some(Self {
            pins: Path::new("/sys/fs/bpf").join(name),
            cgroup,
        })
    }

    fn load(&self, capacity: u32) -> Result<Dataplane, Error> {
        Dataplane::load(&self.pins, capacity)
    }

    /// Loads the programs as a daemon's start does.
    fn start(&self, capacity: u32) -> Dataplane {
        let mut plane = self.load(capacity).expect("loads");
        plane.attach_cgroup(&self.cgroup).expect("attaches");
        assert_eq!(plane.finish_carry_over(), 0);
        plane
    }

    fn pinned(&self, name: &str) -> MapHandle {
        MapHandle::from_pinned_path(self.pins.join(name)).expect("pinned")
    }

    fn changed_maps(&self, capacity: u32) -> Vec<&'static str> {
        let (changes, errors) = Dataplane::survey_pins(&self.pins, capacity).expect("surveyed");
        assert!(errors.is_empty(), "{errors:?}");
        changes.iter().map(|change| change.name).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.pins);
        let _ = std::fs::remove_dir(&self.cgroup);
    }
}

fn key(port: u16) -> FlowKey {
    FlowKey::new(
        6,
        "10.0.0.1:80".parse().expect("an address"),
        ([10, 0, 0, 2], port).into(),
    )
}

fn value(epoch: u32) -> FlowValue {
    FlowValue {
        epoch,
        state: FlowState::Owned as u8,
        ..FlowValue::default()
    }
}

#[test]
fn entries_survive_any_capacity_that_holds_them() {
    let Some(host) = Host::new("capacity") else {
        return;
    };
    let plane = host.start(CAPACITY);
    let record = Record {
        epoch: 3,
        owner: 2,
        state: RECORD_OWNED,
        ..Record::default()
    };
    for port in 1..=5 {
        plane
            .flows
            .set(&key(port), &value(port.into()))
            .expect("set");
    }
    plane.steering.set(&key(1), &record).expect("set");
    drop(plane);
    assert_eq!(host.changed_maps(CAPACITY), [""; 0]);
    for capacity in [2 * CAPACITY, 5, 10_000] {
        assert_eq!(host.changed_maps(capacity), ["flows", "steering"]);
        let plane = host.start(capacity);
        for port in 1..=5 {
            let found = plane.flows.get(&key(port)).expect("get");
            assert_eq!(found, Some(value(port.into())), "{capacity}");
        }
        assert_eq!(plane.flows.entries().len(), 5);
        assert_eq!(plane.steering.get(&key(1)).expect("get"), Some(record));
        assert_eq!(host.pinned("flows").max_entries(), capacity);
        assert_eq!(host.changed_maps(capacity), [""; 0]);
    }
}

#[test]
fn capacity_below_use_is_refused_and_changes_nothing() {
    let Some(host) = Host::new("refused") else {
        return;
    };
    let plane = host.start(CAPACITY);
    for port in 1..=5 {
        plane.flows.set(&key(port), &value(1)).expect("set");
    }
    drop(plane);
    let Err(error) = host.load(4) else {
        panic!("4 flows do not hold 5");
    };
    assert!(
        matches!(
            error,
            Error::TooManyEntries {
                entries: 5,
                capacity: 4,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("raise node.capacity"), "{error}");
    assert_eq!(host.pinned("flows").max_entries(), CAPACITY);
    assert_eq!(host.start(CAPACITY).flows.entries().len(), 5);
}

#[test]
fn start_that_ends_before_the_programs_are_replaced_changes_no_pin() {
    let Some(host) = Host::new("unattached") else {
        return;
    };
    host.start(CAPACITY)
        .flows
        .set(&key(1), &value(1))
        .expect("set");
    drop(host.load(2 * CAPACITY).expect("loads"));
    assert_eq!(host.pinned("flows").max_entries(), CAPACITY);
    assert_eq!(host.start(CAPACITY).flows.entries(), [(key(1), value(1))]);
}

#[test]
fn changes_by_the_earlier_programs_are_carried_over_too() {
    let Some(host) = Host::new("late") else {
        return;
    };
    let plane = host.start(CAPACITY);
    for port in 1..=3 {
        plane.flows.set(&key(port), &value(1)).expect("set");
    }
    drop(plane);
    let earlier = host.pinned("flows");
    let mut plane = host.load(2 * CAPACITY).expect("loads");
    // The earlier programs change a flow, change another that the new ones change too, and add a flow.
    for port in [2, 3, 4] {
        let updated = earlier.update(key(port).as_bytes(), value(7).as_bytes(), MapFlags::ANY);
        updated.expect("set");
    }
    plane.flows.set(&key(3), &value(9)).expect("set");
    plane.attach_cgroup(&host.cgroup).expect("attaches");
    assert_eq!(plane.finish_carry_over(), 0);
    for (port, epoch) in [(1, 1), (2, 7), (3, 9), (4, 7)] {
        let found = plane.flows.get(&key(port)).expect("get");
        assert_eq!(found, Some(value(epoch)), "port {port}");
    }
}

#[test]
fn shorter_values_are_padded_and_other_keys_refused() {
    let Some(host) = Host::new("layout") else {
        return;
    };
    std::fs::create_dir(&host.pins).expect("created");
    let options = bpf_map_create_opts {
        sz: size_of::<bpf_map_create_opts>() as u64,
        map_flags: libbpf_rs::libbpf_sys::BPF_F_NO_PREALLOC,
        ..bpf_map_create_opts::default()
    };
    let create = |key_size: u32, value_size: u32| {
        let (kind, name) = (MapType::Hash, Some("flows"));
        MapHandle::create(kind, name, key_size, value_size, CAPACITY, &options).expect("created")
    };
    let key_size = size_of::<FlowKey>() as u32;
    let mut short = create(key_size, 8);
    let first_bytes = &value(5).as_bytes()[..8].to_vec();
    short
        .update(key(1).as_bytes(), first_bytes, MapFlags::ANY)
        .expect("set");
    short.pin(host.pins.join("flows")).expect("pinned");
    assert_eq!(host.changed_maps(CAPACITY), ["flows"]);
    assert_eq!(host.start(CAPACITY).flows.entries(), [(key(1), value(5))]);

    std::fs::remove_file(host.pins.join("flows")).expect("removed");
    create(12, 8).pin(host.pins.join("flows")).expect("pinned");
    let Err(error) = host.load(CAPACITY) else {
        panic!("keys of another layout are no flows");
    };
    assert!(error.to_string().contains("holdfast node clean"), "{error}");
}

#[test]
fn settings_are_written_back() {
    let Some(host) = Host::new("settings") else {
        return;
    };
    let plane = host.start(CAPACITY);
    let [before, after] = [1, 2].map(|own_id| Config {
        own_id,
        ready: 1,
        ..Config::default()
    });
    plane.set_config(&before).expect("set");
    plane.peers.set(&[1; 16], &1).expect("set");
    let backup = plane.back_up_settings().expect("read");
    plane.set_config(&after).expect("set");
    plane.peers.set(&[2; 16], &2).expect("set");
    plane.peers.remove(&[1; 16]).expect("removed");
    backup.restore().expect("written");
    let config = host.pinned("config").lookup(0u32.as_bytes(), MapFlags::ANY);
    assert_eq!(config.expect("get").as_deref(), Some(before.as_bytes()));
    assert_eq!(plane.peers.entries(), [([1; 16], 1)]);
}

/// A daemon that starts renews the lease of the programs of an earlier one before its own programs are loaded.
#[test]
fn lease_of_an_earlier_daemon_is_renewed_for_the_view_of_its_table() {
    let Some(host) = Host::new("pinned-lease") else {
        return;
    };
    assert!(Lease::open_pinned(&host.pins).expect("no pins").is_none());
    let earlier = host.start(CAPACITY);
    earlier.lease.set_table_epoch(7);
    let pinned = Lease::open_pinned(&host.pins).expect("opens");
    let pinned = pinned.expect("a pinned lease");
    let epochs: Vec<u64> = (5..11)
        .filter(|epoch| pinned.has_table_for(*epoch))
        .collect();
    assert_eq!(epochs, [7, 8]);
    pinned.writer().set_until_ns(99);
    assert_eq!(earlier.lease.until_ns(), 99);
    // Programs with another lease are of another release.
    drop(earlier);
    let path = host.pins.join("lease");
    std::fs::remove_file(&path).expect("pinned");
    let options = bpf_map_create_opts {
        sz: size_of::<bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let mut other =
        MapHandle::create(MapType::Array, Some("lease"), 4, 16, 1, &options).expect("a map");
    other.pin(&path).expect("pins");
    assert!(Lease::open_pinned(&host.pins).expect("opens").is_none());
}
