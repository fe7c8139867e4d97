package prefix_test

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/waymark-routes/waymark/internal/prefix"
)

func TestCanonical(t *testing.T) {
	tests := []struct{ text, want string }{
		{"10.244.1.0/24", "10.244.1.0/24"},
		{"10.244.1.5/24", "10.244.1.0/24"},
		{"010.244.001.000/24", "10.244.1.0/24"},
		{"FD00:0010:0244:0001:0:0:0:0/64", "fd00:10:244:1::/64"},
		{"::ffff:10.244.1.0/120", "10.244.1.0/24"},
		{"::ffff:0:0/90", ""},
		{"", ""},
		{"not-a-cidr", ""},
		{"10.244.1.0", ""},
		{"10.244.1.0/33", ""},
		{" 10.244.1.0/24", ""},
		{"10.244.1.0/24 ", ""},
		{"pl-0123", ""},
	}
	for _, test := range tests {
		got, err := prefix.Canonical(test.text)
		if test.want == "" {
			if err == nil {
				t.Errorf("Canonical(%q) = %v, want an error", test.text, got)
			}
			continue
		}
		if err != nil || got.String() != test.want {
			t.Errorf("Canonical(%q) = %v, %v; want %s", test.text, got, err, test.want)
		}
	}
}

func TestAddr(t *testing.T) {
	tests := []struct{ text, want string }{
		{"192.0.2.1", "192.0.2.1"},
		{"192.000.002.001", "192.0.2.1"},
		{"2001:DB8:0:0::1", "2001:db8::1"},
		{"::ffff:192.0.2.1", "192.0.2.1"},
		{"fe80::1%eth0", "fe80::1"},
		{"a.example.internal", ""},
		{"", ""},
		{"1.2.3", ""},
	}
	for _, test := range tests {
		got, ok := prefix.Addr(test.text)
		if ok != (test.want != "") || (ok && got.String() != test.want) {
			t.Errorf("Addr(%q) = %v, %t; want %q", test.text, got, ok, test.want)
		}
	}
}

func TestCanonicalIsIdempotent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		addr := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "v4")))
		bits := rapid.IntRange(0, 32).Draw(t, "bits")
		once, err := prefix.Canonical(netip.PrefixFrom(addr, bits).String())
		if err != nil {
			t.Fatal(err)
		}
		if twice, err := prefix.Canonical(once.String()); err != nil || twice != once {
			t.Fatalf("%v became %v, %v", once, twice, err)
		}
	})
}

func TestContains(t *testing.T) {
	tests := []struct {
		outer, inner string
		want         bool
	}{
		{"10.244.0.0/16", "10.244.1.0/24", true},
		{"10.244.0.0/16", "10.244.0.0/16", true},
		{"10.0.0.0/16", "10.0.0.0/8", false},
		{"10.255.0.0/16", "10.0.0.0/8", false},
		{"10.244.0.0/16", "10.245.0.0/24", false},
		{"10.244.0.0/16", "fd00::/64", false},
		{"::/0", "10.244.0.0/16", false},
	}
	for _, test := range tests {
		if got := prefix.Contains(netip.MustParsePrefix(test.outer), netip.MustParsePrefix(test.inner)); got != test.want {
			t.Errorf("Contains(%s, %s) = %t", test.outer, test.inner, got)
		}
	}
}
