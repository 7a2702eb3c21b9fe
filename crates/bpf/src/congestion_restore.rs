//! Congestion control in eBPF that restores a socket's congestion state (`c/congestion.bpf.c`).

use libbpf_rs::{MapCore, Object, ObjectBuilder};

use crate::Error;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/congestion.bpf.o"));

/// The congestion control that sets a restored socket's window; unregistered when dropped.
pub(crate) struct CongestionRestorer {
    pub(crate) object: Object,
    _link: libbpf_rs::Link,
    pub(crate) name: String,
}

/// Offset of the name in `struct tcp_congestion_ops` of `c/congestion.bpf.c`, bytes: it follows four function pointers.
const CONGESTION_NAME_OFFSET: usize = 32;

/// Registers the congestion control. Its name is unique to the daemon, because the whole kernel has one name space.
pub(crate) fn load() -> Result<CongestionRestorer, Error> {
    let load_error = |e: libbpf_rs::Error| Error::Load(format!("{e:#}"));
    // Process IDs repeat between PID namespaces; the clock tells daemons apart.
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |now| now.as_nanos() as u64);
    let name = format!("hf_{:012x}", now & 0xffff_ffff_ffff);
    let mut open = ObjectBuilder::default()
        .open_memory(OBJECT)
        .map_err(load_error)?;
    for mut map in open.maps_mut() {
        if map.name() != "holdfast_restore" {
            continue;
        }
        if let Some(value) = map.initial_value_mut() {
            value[CONGESTION_NAME_OFFSET..].fill(0);
            value[CONGESTION_NAME_OFFSET..CONGESTION_NAME_OFFSET + name.len()]
                .copy_from_slice(name.as_bytes());
        }
    }
    let mut object = open.load().map_err(load_error)?;
    let map = object
        .maps_mut()
        .find(|map| map.name() == "holdfast_restore");
    let link = map
        .ok_or_else(|| Error::Load("holdfast_restore is missing".into()))?
        .attach_struct_ops()
        .map_err(load_error)?;
    Ok(CongestionRestorer {
        object,
        _link: link,
        name,
    })
}
