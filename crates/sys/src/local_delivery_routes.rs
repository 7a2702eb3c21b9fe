//! Routes and rules (`ip-rule(8)`) that deliver packets for another host's address to this host: for connections that
//! migrated here with their process.

use crate::netlink::{Netlink, NetlinkRequest, attributes};
use std::io;

/// Attributes of `linux/fib_rules.h`.
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
/// `FR_ACT_TO_TBL`.
const ACTION_TO_TABLE: u8 = 1;
/// Attributes of `linux/rtnetlink.h`.
const RTA_OIF: u16 = 4;
const RTA_TABLE: u16 = 15;

/// Makes routing deliver to this host all packets with the mark `mark` and all packets from the interface `from_interface`.
/// `table` is both the number of a routing table that nothing else uses and the priority of the rules that lead to it.
/// Existing routes and rules stay.
///
/// # Errors
/// Errors of the netlink request.
pub fn deliver_locally(mark: u32, from_interface: &str, table: u32) -> io::Result<()> {
    for family in [libc::AF_INET, libc::AF_INET6] {
        match install_rules(family as u8, mark, from_interface, table) {
            // A host without IPv6 has no such packets to deliver.
            Err(error)
                if family == libc::AF_INET6
                    && matches!(
                        error.raw_os_error(),
                        Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EACCES)
                    ) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Returns true if this network namespace has a rule of [`deliver_locally`] with this table.
///
/// # Errors
/// Errors of the netlink request.
pub fn has_local_delivery(table: u32) -> io::Result<bool> {
    let mut is_found = false;
    let message = NetlinkRequest::new(libc::RTM_GETRULE, 0, &[0; 12]);
    let flags = libc::NLM_F_DUMP;
    Netlink::new(libc::NETLINK_ROUTE)?.request(message, flags, |_, body| {
        let mut all = attributes(body.get(12..).unwrap_or(&[]));
        is_found |= all.any(|(kind, value)| kind == FRA_TABLE && *value == table.to_ne_bytes());
    })?;
    Ok(is_found)
}

/// Removes the routes and rules of [`deliver_locally`] with these arguments. Absent ones are no error.
///
/// # Errors
/// Errors of the netlink request.
pub fn end_local_delivery(mark: u32, from_interface: &str, table: u32) -> io::Result<()> {
    let loopback = crate::net::interface_index("lo")?;
    for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
        let mut netlink = Netlink::new(libc::NETLINK_ROUTE)?;
        for condition in rule_conditions(mark, from_interface) {
            ignore_absent(netlink.change(rule_request(
                libc::RTM_DELRULE,
                0,
                family,
                table,
                &condition,
            )))?;
        }
        let request = NetlinkRequest::new(libc::RTM_DELROUTE, 0, &route_message(family))
            .attribute(RTA_OIF, &loopback.to_ne_bytes())
            .attribute(RTA_TABLE, &table.to_ne_bytes());
        ignore_absent(netlink.change(request))?;
    }
    Ok(())
}

/// Turns the error of a removal into success if there was nothing to remove, or the host has no IPv6.
fn ignore_absent(outcome: io::Result<()>) -> io::Result<()> {
    let error_number = outcome.as_ref().err().and_then(io::Error::raw_os_error);
    match error_number {
        Some(libc::ENOENT | libc::ESRCH | libc::EAFNOSUPPORT | libc::EOPNOTSUPP) => Ok(()),
        _ => outcome,
    }
}

/// Attribute that selects the packets of a rule.
type RuleCondition = (u16, Vec<u8>);

/// Returns the condition of each rule.
fn rule_conditions(mark: u32, from_interface: &str) -> [RuleCondition; 2] {
    let mut name = from_interface.as_bytes().to_vec();
    name.push(0);
    [
        (FRA_FWMARK, mark.to_ne_bytes().to_vec()),
        (FRA_IIFNAME, name),
    ]
}

fn rule_request(
    kind: u16,
    flags: i32,
    family: u8,
    table: u32,
    (condition, value): &RuleCondition,
) -> NetlinkRequest {
    NetlinkRequest::new(kind, flags, &rule_message(family))
        .attribute(FRA_PRIORITY, &table.to_ne_bytes())
        .attribute(FRA_TABLE, &table.to_ne_bytes())
        .attribute(*condition, value)
}

fn install_rules(family: u8, mark: u32, from_interface: &str, table: u32) -> io::Result<()> {
    let mut netlink = Netlink::new(libc::NETLINK_ROUTE)?;
    let loopback = crate::net::interface_index("lo")?;
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    let route = NetlinkRequest::new(libc::RTM_NEWROUTE, flags, &route_message(family))
        .attribute(RTA_OIF, &loopback.to_ne_bytes())
        .attribute(RTA_TABLE, &table.to_ne_bytes());
    netlink.change(route)?;
    for condition in rule_conditions(mark, from_interface) {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let rule = rule_request(libc::RTM_NEWRULE, flags, family, table, &condition);
        match netlink.change(rule) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Builds the `struct rtmsg` of a default route to this host itself.
fn route_message(family: u8) -> [u8; 12] {
    let mut head = [0; 12];
    head[0] = family;
    head[5] = libc::RTPROT_STATIC;
    head[6] = libc::RT_SCOPE_HOST;
    head[7] = libc::RTN_LOCAL;
    head
}

/// Builds a `struct fib_rule_hdr`.
fn rule_message(family: u8) -> [u8; 12] {
    let mut head = [0; 12];
    head[0] = family;
    head[7] = ACTION_TO_TABLE;
    head
}
