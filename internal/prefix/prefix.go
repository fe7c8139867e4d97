// Package prefix reads CIDRs and addresses as tolerantly as Kubernetes does and
// brings them into one canonical form, so that two spellings of one prefix are
// one value (field cases B-07, B-08). It is pure and has no state.
package prefix

import (
	"fmt"
	"net/netip"
	"strings"

	netutils "k8s.io/utils/net"
)

// Parse reads a CIDR: leading zeros are taken (the rules of ParseCIDRSloppy),
// surrounding space is not. Host bits are kept; see Canonical.
func Parse(text string) (netip.Prefix, error) {
	if prefix, err := netip.ParsePrefix(text); err == nil && !prefix.Addr().Is4In6() {
		return prefix, nil // the common spelling, without allocation
	}
	ip, network, err := netutils.ParseCIDRSloppy(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("parse %q as CIDR: %w", text, err)
	}
	addr, _ := netip.AddrFromSlice(ip)
	addr = addr.Unmap()
	ones, bits := network.Mask.Size()
	if addr.BitLen() < bits { // ::ffff:10.0.0.0/104 is 10.0.0.0/8
		ones -= bits - addr.BitLen()
	}
	if ones < 0 {
		return netip.Prefix{}, fmt.Errorf("parse %q as CIDR: it is wider than the IPv4-mapped range", text)
	}
	return netip.PrefixFrom(addr, ones), nil
}

// Canonical reads a CIDR and masks it.
func Canonical(text string) (netip.Prefix, error) {
	prefix, err := Parse(text)
	if err != nil {
		return netip.Prefix{}, err
	}
	return prefix.Masked(), nil
}

// Addr reads an IP address as tolerantly as Parse does. ok is false for text
// that is no address, such as a host name. Zones are dropped.
func Addr(text string) (addr netip.Addr, ok bool) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return addr.Unmap().WithZone(""), true
	}
	if strings.Trim(text, "0123456789.") != "" { // only IPv4 has leading zeros to forgive
		return netip.Addr{}, false
	}
	addr, ok = netip.AddrFromSlice(netutils.ParseIPSloppy(text))
	return addr.Unmap(), ok
}

// Contains says whether inner lies fully inside outer. Both are canonical.
func Contains(outer, inner netip.Prefix) bool {
	return outer.Addr().BitLen() == inner.Addr().BitLen() && outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}
