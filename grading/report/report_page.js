// A link in the class table opens its submission; printing opens all. Without script a click opens each.
(function () {
  var all = Array.prototype.slice.call(document.querySelectorAll("details"));
  var button = document.getElementById("all");
  function openTarget() {
    var target = /^#s\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (target) { target.open = true; target.scrollIntoView(); }
  }
  function setAll(open) { all.forEach(function (each) { each.open = open; }); }
  button.hidden = all.length < 2;
  button.addEventListener("click", function () {
    var open = all.some(function (each) { return !each.open; });
    setAll(open);
    button.textContent = open ? "Close all" : "Open all";
  });
  addEventListener("hashchange", openTarget);
  addEventListener("beforeprint", function () { setAll(true); });
  openTarget();
})();
