//! Congestion control in eBPF that restores a socket's congestion state (`c/congestion.bpf.c`).

use libbpf_rs::{MapCore, Object, ObjectBuilder};

use crate::Error;

static CONGESTION: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/congestion.bpf.o"));

/// The congestion control that sets a restored socket's window; unregistered when dropped.
pub(crate) struct Restorer {
    pub(crate) object: Object,
    _link: libbpf_rs::Link,
    pub(crate) name: String,
}

/// Offset of the name in `struct tcp_congestion_ops` of `c/congestion.bpf.c`, bytes: it follows four function pointers.
const CONGESTION_NAME_AT: usize = 32;

/// Registers the congestion control. Its name is unique to the daemon, because the whole kernel has one name space.
pub(crate) fn load() -> Result<Restorer, Error> {
    let refused = |e: libbpf_rs::Error| Error::Load(format!("{e:#}"));
    // Process IDs repeat between PID namespaces; the clock tells daemons apart.
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |now| now.as_nanos() as u64);
    let name = format!("hf_{:012x}", now & 0xffff_ffff_ffff);
    let mut open = ObjectBuilder::default()
        .open_memory(CONGESTION)
        .map_err(refused)?;
    for mut map in open.maps_mut() {
        if map.name() != "holdfast_restore" {
            continue;
        }
        if let Some(value) = map.initial_value_mut() {
            value[CONGESTION_NAME_AT..].fill(0);
            value[CONGESTION_NAME_AT..CONGESTION_NAME_AT + name.len()]
                .copy_from_slice(name.as_bytes());
        }
    }
    let mut object = open.load().map_err(refused)?;
    let map = object
        .maps_mut()
        .find(|map| map.name() == "holdfast_restore");
    let link = map
        .ok_or_else(|| Error::Load("holdfast_restore is missing".into()))?
        .attach_struct_ops()
        .map_err(refused)?;
    Ok(Restorer {
        object,
        _link: link,
        name,
    })
}
