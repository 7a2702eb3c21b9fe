//! Commands for `ip`, and the kernel settings of hosts and switch. Pure functions of the plan.

use std::{collections::BTreeMap, fmt::Write as _};

use crate::{
    address_plan::{AddressPlan, HostKind, LabHost, MacAddress},
    link::LinkConfig,
    namespace::ProcessRef,
};

/// Returns the interface in the switch's namespace that leads to a host.
pub(crate) fn switch_end(host: &LabHost) -> String {
    host.name.clone()
}

/// Returns the bridge port of a host: the interface that leads to the host or, behind the link program, one end of a
/// pair with [`wire`] as the other end.
pub(crate) fn bridge_port(host: &LabHost, spliced: bool) -> String {
    if spliced {
        format!("{}-port", host.name)
    } else {
        switch_end(host)
    }
}

/// Returns the interface at which the link program sends and receives the frames of a bridge port.
pub(crate) fn link_program_end(host: &LabHost) -> String {
    format!("{}-wire", host.name)
}

/// Returns the bridge of a segment.
pub(crate) fn bridge_name(segment: u16) -> String {
    format!("br{segment}")
}

/// Returns the settings of a host. Must be applied before `eth0` exists, which inherits the defaults.
pub(crate) fn host_settings() -> Vec<(String, String)> {
    let mut settings = interface_settings();
    settings.extend(
        [
            ("net/core/somaxconn", "8192"),
            ("net/ipv4/tcp_max_syn_backlog", "8192"),
        ]
        .map(to_strings),
    );
    settings
}

/// Returns the settings of the switch.
pub(crate) fn switch_settings() -> Vec<(String, String)> {
    let mut settings = interface_settings();
    settings.extend(
        [
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
            ("net/ipv6/conf/default/forwarding", "1"),
            // Ports carry frames and have no addresses; IPv6 is enabled again on each bridge.
            ("net/ipv6/conf/default/disable_ipv6", "1"),
            ("net/bridge/bridge-nf-call-iptables", "0"),
            ("net/bridge/bridge-nf-call-ip6tables", "0"),
            ("net/bridge/bridge-nf-call-arptables", "0"),
            // Network namespaces created here get their own connection tables: walking a small table is fast.
            ("net/ipv4/tcp_child_ehash_entries", "16384"),
        ]
        .map(to_strings),
    );
    settings
}

fn interface_settings() -> Vec<(String, String)> {
    let mut settings = Vec::new();
    for scope in ["all", "default"] {
        for (family, name, value) in [
            ("ipv4", "rp_filter", "0"),
            ("ipv4", "accept_redirects", "0"),
            ("ipv4", "send_redirects", "0"),
            ("ipv6", "accept_redirects", "0"),
            ("ipv6", "accept_ra", "0"),
            ("ipv6", "router_solicitations", "0"),
            ("ipv6", "accept_dad", "0"),
            ("ipv6", "dad_transmits", "0"),
        ] {
            settings.push((format!("net/{family}/conf/{scope}/{name}"), value.into()));
        }
    }
    settings
}

fn to_strings((name, value): (&str, &str)) -> (String, String) {
    (name.into(), value.into())
}

/// Creates the bridges, without addresses.
pub(crate) fn bridge_script(plan: &AddressPlan) -> String {
    let mut script = String::from("link set lo up\n");
    for segment in plan.all_segments() {
        let (name, mac) = (bridge_name(segment), plan.router_mac(segment));
        push_line(
            &mut script,
            format_args!(
                "link add {name} address {mac} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
            ),
        );
    }
    script
}

/// Gives the bridges the router's addresses and creates the hosts' links.
pub(crate) fn link_script(
    plan: &AddressPlan,
    hosts: &[(LabHost, bool)],
    inits: &BTreeMap<String, ProcessRef>,
) -> String {
    let mut script = String::new();
    for segment in plan.all_segments() {
        let (name, (v4, v6)) = (bridge_name(segment), plan.router_addresses(segment));
        push_line(
            &mut script,
            format_args!("addr add {v4}/24 brd + dev {name}"),
        );
        push_line(
            &mut script,
            format_args!("addr add {v6}/64 dev {name} nodad"),
        );
        push_line(&mut script, format_args!("link set {name} up"));
    }
    for (host, spliced) in hosts {
        add_link(&mut script, host, *spliced, init_pid(host, inits));
    }
    script
}

/// Creates the link of one host that is not behind the link program.
pub(crate) fn host_link_script(host: &LabHost, inits: &BTreeMap<String, ProcessRef>) -> String {
    let mut script = String::new();
    add_link(&mut script, host, false, init_pid(host, inits));
    script
}

fn init_pid(host: &LabHost, inits: &BTreeMap<String, ProcessRef>) -> i32 {
    inits.get(&host.name).map_or(0, |init| init.pid)
}

fn add_link(script: &mut String, host: &LabHost, spliced: bool, pid: i32) {
    let (near, port, mac) = (switch_end(host), bridge_port(host, spliced), host.mac);
    let near_mac = end_mac(mac, 0x10);
    push_line(
        script,
        format_args!(
            "link add {near} address {near_mac} type veth peer name eth0 address {mac} netns {pid}"
        ),
    );
    if spliced {
        let (wire, wire_mac, port_mac) = (
            link_program_end(host),
            end_mac(mac, 0x20),
            end_mac(mac, 0x30),
        );
        push_line(
            script,
            format_args!(
                "link add {port} address {port_mac} type veth peer name {wire} address {wire_mac}"
            ),
        );
        // The switch's own stack sees the frames too; it must not answer on these interfaces.
        push_line(script, format_args!("link set {near} arp off"));
        push_line(script, format_args!("link set {wire} arp off"));
        push_line(script, format_args!("link set {wire} up"));
        push_line(script, format_args!("link set {port} up"));
    }
    push_line(
        script,
        format_args!("link set {port} master {}", bridge_name(host.segment)),
    );
    // See `switch_end_features`: frames are polled for, but never merged.
    push_line(script, format_args!("link set {near} gro_max_size 1"));
    push_line(script, format_args!("link set {near} up"));
}

/// Configures a host's own side.
pub(crate) fn host_script(plan: &AddressPlan, host: &LabHost) -> String {
    let (router4, router6) = plan.router_addresses(host.segment);
    let (v4, v6) = (host.v4, host.v6);
    format!(
        "link set lo up\n\
         addr add {v4}/24 brd + dev eth0\n\
         addr add {v6}/64 dev eth0 nodad\n\
         link set eth0 up\n\
         route add 0.0.0.0/0 via {router4}\n\
         route add ::/0 via {router6}\n"
    )
}

/// Returns the arguments of `ethtool -K` for `eth0`. A client's packets carry full checksums, as if from a network
/// card: a redirect by XDP at a node would lose the mark of a missing checksum. The link program, which sees only
/// bytes, needs full checksums from every host behind it.
pub(crate) fn eth0_features(host: &LabHost, spliced: bool) -> Vec<&'static str> {
    let mut features = vec!["gro", "on"];
    if host.kind == HostKind::Client || spliced {
        features.extend(["tx", "off", "tso", "off"]);
    }
    features
}

/// Returns the arguments of `ip` and `tc` for an interface with a rate enforced by the kernel. Packets for segmentation
/// by the card are kept small, so that the burst that exceeds the rate is small.
pub(crate) fn rate_limit_commands(interface: &str, link: &LinkConfig) -> (String, String) {
    const SEGMENTED_PACKET_BYTES: usize = 16_384;
    const FRAME_BYTES: usize = 1514;
    let rate = link.rate_bits.unwrap_or(u64::MAX);
    let (burst, limit) = (
        SEGMENTED_PACKET_BYTES + FRAME_BYTES,
        (link.queue_packets * FRAME_BYTES).max(2 * SEGMENTED_PACKET_BYTES),
    );
    (
        format!("link set {interface} gso_max_size {SEGMENTED_PACKET_BYTES}\n"),
        format!(
            "qdisc add dev {interface} root tbf rate {rate}bit burst {burst}b limit {limit}b\n"
        ),
    )
}

/// Returns the arguments of `ethtool -K` for the interface that leads to a host. GRO makes the interface poll, which is
/// required to receive frames that an XDP program redirects to `eth0`; `gro_max_size` prevents merging, which a switch
/// would not do. `XDP_TX` would need an XDP program here too (without one the kernel does not wake the other end), at
/// the cost of five sixths of the throughput.
pub(crate) fn switch_end_features() -> Vec<&'static str> {
    vec!["gro", "on"]
}

/// Returns the arguments of `ethtool -K` for a bridge port read by the link program, which sees only bytes: full
/// checksums and no packets above the MTU.
pub(crate) fn spliced_port_features() -> Vec<&'static str> {
    vec!["tx", "off", "tso", "off", "gso", "off"]
}

fn end_mac(mac: MacAddress, end: u8) -> MacAddress {
    let [a, b, c, d, group, index] = mac.0;
    MacAddress([a, b, c, d, group | end, index])
}

fn push_line(script: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = writeln!(script, "{text}");
}
