//! The congestion control in eBPF (`c/congestion.bpf.c`).

use libbpf_rs::{MapCore, Object, ObjectBuilder};

use crate::Error;

static CONGESTION: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/congestion.bpf.o"));

/// The congestion control that gives a restored socket its window; unregistered when dropped.
pub(crate) struct Restorer {
    pub(crate) object: Object,
    _link: libbpf_rs::Link,
    pub(crate) name: String,
}

/// Bytes of `struct tcp_congestion_ops` in `c/congestion.bpf.c` before its name: four function pointers.
const CONGESTION_NAME_AT: usize = 32;

/// Congestion controls have one name space for the whole kernel, so each daemon's restorer has a name of its own.
pub(crate) fn load() -> Result<Restorer, Error> {
    let refused = |e: libbpf_rs::Error| Error::Load(format!("{e:#}"));
    // Process ids repeat from PID namespace to PID namespace; the clock tells daemons apart.
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
